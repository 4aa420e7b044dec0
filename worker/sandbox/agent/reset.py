"""After a job: every writable place is emptied, and that nothing is left is verified, not assumed."""

import os
import signal
import stat

from . import kernel

PLACES = ("/box", "/tmp", "/dev/shm", "/dev/mqueue")


class Reset:
    """Knows how the sandbox looked at birth."""

    def __init__(self, uid: int, home: str) -> None:
        self.uid = uid
        for place in {"/box", "/tmp", "/dev/shm", home}:
            os.chmod(place, 0o1777)  # not every engine honours the mode it was told
        self.places = [place for place in dict.fromkeys((*PLACES, home)) if os.path.ismount(place)]
        self.birth = [self._free(place) for place in self.places]
        try:
            self.sockets = os.open("/proc/net/sockstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # gVisor shows none, and its sandbox without a network has none
            self.sockets = -1
        self.sockets_at_birth = self._sockets()

    def verify(self) -> str:
        """Empty every place; what is not as at birth, in one sentence, or nothing."""
        try:
            os.kill(-1, 0)
        except ProcessLookupError:
            pass
        else:
            return "a process is left"
        if self._sockets() != self.sockets_at_birth:
            return "a socket lingers"
        remains = self._remains()
        if remains:
            self._wipe()
            remains = self._remains()
        return remains

    def _remains(self) -> str:
        for place, birth in zip(self.places, self.birth, strict=True):
            if os.listdir(place):
                return f"{place} is not empty"
            if self._free(place) != birth:
                return f"{place} has other free space than at birth"
        return ""

    def _wipe(self) -> None:
        """By a child that is the job's user: we may not touch what it locked."""
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
        """How many sockets there are in all; and how many of TCP are in use, or wait out their time, so that the next
        program could see their ports. One of no process at all may be there still, and hold files: in its own queue."""
        words = b"" if self.sockets < 0 else os.pread(self.sockets, 4096, 0)
        tcp = words.partition(b"TCP: ")[2].split()
        return words.split()[2:3] + tcp[1:2] + tcp[5:6]

    @staticmethod
    def _free(place: str) -> tuple[int, int]:
        free = os.statvfs(place)
        return free.f_bfree, free.f_ffree


def _remove(path: str) -> None:
    """A tree, whatever its modes. One too deep for this stays, is found by the verification, and ends the sandbox."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        _remove(f"{path}/{name}")
    os.rmdir(path)
