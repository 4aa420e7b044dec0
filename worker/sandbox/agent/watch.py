"""The agent's side of the fork: feed the program, read it, stop it in time, and count what it used."""

import os
import select
import signal
import time
from dataclasses import dataclass, field

from .kernel import Counters

DRAIN = 1 << 16
REPORT_BYTES = 256


@dataclass
class Watched:
    """What is known of a run so far."""

    ended: str = "itself"
    """Who ended it: itself, or the limit that was reached: cpu, wall, output."""
    status: int | None = None
    """Of the program's first process, as `wait4` gives it."""
    cpu: float = 0.0
    """Of everything reaped: what `wait4` counts."""
    rss: int = 0
    """Largest resident set of any one process, in bytes."""
    processes: int = 1
    report: bytes = b""
    kept: dict[int, bytearray] = field(default_factory=dict)
    total: dict[int, int] = field(default_factory=dict)


class Watch:
    """One run, from the fork to the last dead process."""

    def __init__(self, counters: Counters, control: int, limits: dict[str, float]) -> None:
        self.counters, self.control, self.limits = counters, control, limits
        self.found = Watched()

    def run(self, pid: int, stdin: int, feed: bytes, streams: tuple[int, int], report: int) -> Watched:
        """Until the first process is over or a limit is reached; then nothing of the program is left alive."""
        started = time.monotonic()
        cpu_started, own_started = self.counters.cpu_seconds(), time.process_time()
        pidfd = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(self.control, 0)  # only its end matters: the worker is gone, and so are we
        cap = int(self.limits["output_bytes"])
        for fd in (*streams, report):
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
            self.found.kept[fd], self.found.total[fd] = bytearray(), 0
        rest = memoryview(feed)
        if rest:
            os.set_blocking(stdin, False)
            poll.register(stdin, select.POLLOUT)
        else:
            os.close(stdin)

        deadline = started + self.limits["wall_seconds"]
        check_cpu = started + self.limits["cpu_seconds"]
        running = True
        while running:
            now = time.monotonic()
            if now >= deadline:
                self.found.ended = "wall"
                break
            if now >= check_cpu:
                spent = self.counters.cpu_seconds() - cpu_started - (time.process_time() - own_started)
                left = self.limits["cpu_seconds"] - spent
                if left <= 0:
                    self.found.ended = "cpu"
                    break
                check_cpu = now + max(left / self.limits["cpus"], 0.002)
            for fd, event in poll.poll(max(0.0, min(deadline, check_cpu) - now) * 1000 + 1):
                if fd == pidfd:
                    running = False
                elif fd == self.control:
                    os._exit(0)
                elif fd == stdin:
                    rest = self._feed(stdin, rest, event)
                    if not rest:
                        poll.unregister(stdin)
                        os.close(stdin)
                elif not self._read(fd, cap):
                    poll.unregister(fd)
            if any(self.found.total[fd] > cap for fd in streams):
                self.found.ended = "output"
                break
            self.found.processes = max(self.found.processes, self.counters.processes() - 1)
        if rest:
            os.close(stdin)
        os.close(pidfd)
        self._end(pid)
        for fd in (*streams, report):
            while self._read(fd, cap) and self.found.total[fd] <= cap:
                pass
            os.close(fd)
        self.found.report = bytes(self.found.kept[report])
        return self.found

    def _feed(self, stdin: int, rest: memoryview, event: int) -> memoryview:
        if event & select.POLLERR:  # the program has closed its standard input
            return memoryview(b"")
        try:
            return rest[os.write(stdin, rest[:DRAIN]) :]
        except BlockingIOError:
            return rest
        except BrokenPipeError:
            return memoryview(b"")

    def _read(self, fd: int, cap: int) -> bool:
        """One gulp of a stream, kept up to the cap and counted beyond it; False at its end or when it is dry."""
        try:
            data = os.read(fd, DRAIN)
        except BlockingIOError:
            return False
        kept = self.found.kept[fd]
        kept += data[: max(0, cap - len(kept))]
        self.found.total[fd] += len(data)
        return bool(data)

    def _end(self, pid: int) -> None:
        """Kill until nobody is left but us, and count what each had used."""
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return
            try:
                ended, status, usage = os.wait4(-1, 0)
            except ChildProcessError:
                time.sleep(0.001)  # dying, but not yet handed to us
                continue
            self.found.cpu += usage.ru_utime + usage.ru_stime
            self.found.rss = max(self.found.rss, usage.ru_maxrss << 10)
            if ended == pid:
                self.found.status = status
