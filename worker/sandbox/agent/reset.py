"""The reset after a job: empties every writable place, and verifies that nothing is left."""

import os
import signal
import stat

from . import kernel
from .words import HOME

PLACES = (HOME, "/tmp", "/dev/shm", "/dev/mqueue")
COUNTERS = ("/proc/net/dev", "/proc/net/snmp", "/proc/net/snmp6")
"""Files that count packets, even those without a route. Nobody can reset them, so they could carry notes to later jobs.
"""


class Reset:
    """Empties the sandbox, and compares it with what it was at birth."""

    def __init__(self, uid: int, home: str) -> None:
        self.uid = uid
        for place in {HOME, "/tmp", "/dev/shm", home}:
            os.chmod(place, 0o1777)  # not every engine honours the mode that it was given
        self.places = [place for place in dict.fromkeys((*PLACES, home)) if os.path.ismount(place)]
        self.birth = [self._free(place) for place in self.places]
        self.sockets = _open("/proc/net/sockstat")
        self.sockets_at_birth = self._sockets()
        self.counters = [fd for fd in map(_open, COUNTERS) if fd >= 0]
        self.counters_at_birth = self._counters()

    def verify(self) -> str:
        """Empty every writable place. Return what is not as it was at birth, in one sentence, or nothing."""
        try:
            os.kill(-1, 0)
        except ProcessLookupError:
            pass
        else:
            return "a process is left"
        if self._sockets() != self.sockets_at_birth:
            return "a socket is left"
        if self._counters() != self.counters_at_birth:
            return "the packet counters have changed"
        remains = self.remains()
        if remains:
            self._wipe()
            remains = self.remains()
        return remains

    def remains(self) -> str:
        """Return which writable place is not as it was at birth, or nothing."""
        for place, birth in zip(self.places, self.birth, strict=True):
            if os.listdir(place):
                return f"{place} is not empty"
            if self._free(place) != birth:
                return f"{place} does not have the same free space as at birth"
        return ""

    def _wipe(self) -> None:
        """Remove all files, in a child that is the job's user: the agent may not open folders that the job has
        locked."""
        pid = os.fork()
        if not pid:
            try:
                kernel.become(self.uid)
                for place in self.places:
                    for name in os.listdir(place):
                        _remove(f"{place}/{name}")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _sockets(self) -> list[bytes]:
        """Return how many sockets there are in all; how many of TCP are in use; and how many wait for their time to be
        over, so that the next program could see their ports. Even without any process, a socket that lies in its own
        queue stays, and holds files."""
        words = b"" if self.sockets < 0 else os.pread(self.sockets, 4096, 0)
        tcp = words.partition(b"TCP: ")[2].split()
        return words.split()[2:3] + tcp[1:2] + tcp[5:6]

    def _counters(self) -> list[bytes]:
        return [os.pread(fd, 1 << 14, 0) for fd in self.counters]

    @staticmethod
    def _free(place: str) -> tuple[int, int]:
        free = os.statvfs(place)
        return free.f_bfree, free.f_ffree


def _open(path: str) -> int:
    """Return a descriptor, or -1 if there is no such file: gVisor shows few, and none in a sandbox without a
    network."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _remove(path: str) -> None:
    """Remove a tree, whatever its modes are. A tree that is too deep for this stays, so that the verification fails."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        _remove(f"{path}/{name}")
    os.rmdir(path)
