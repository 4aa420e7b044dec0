"""The agent's side of the fork: feed the program, read it, stop it in time, and count what it used."""

import os
import select
import signal
import time

from .interpreter import READY
from .kernel import Counters, delay_seconds
from .program import BORN
from .wire import GULP, Buffer

REPORT_BYTES = 64
SAMPLE_SECONDS = 0.05
"""How often the number of processes is looked at, at least."""
PAUSE_SECONDS = 0.5
"""If nothing in the sandbox ran for longer, not even this loop, the sandbox was paused from outside. Shorter gaps may
come from the CPU quota: a throttled sandbox stops for up to a tenth of a second."""


class Watch:
    """One run, from the fork to the last dead process."""

    def __init__(self, counters: Counters, control: int, limits: dict[str, float]) -> None:
        self.counters, self.control, self.limits = counters, control, limits
        self.ended = "itself"
        """Who ended it: itself, or the limit that was reached: cpu, wall, output."""
        self.status: int = signal.SIGKILL
        """Of the program's first process, as `wait4` gives it."""
        self.reaped_cpu = 0.0
        """Of everything reaped: what `wait4` counts."""
        self.rss = 0
        """Largest resident set of any one process, in bytes."""
        self.processes = 1
        """Most seen alive at once."""
        self.total: dict[int, int] = {}
        """Bytes read of each stream, kept or not."""
        self.delay = 0.0
        """How long one of its threads has waited for a CPU that others had; looked at where the wall limit ends it."""
        self.paused = 0.0
        """Seconds for which the whole sandbox was paused from outside."""
        self._before = counters.snapshot()
        self._started = self._looked = time.monotonic()
        self._cpu = self._before["cpu"]
        """The CPU time of the sandbox at the last look."""

    def run(
        self,
        pid: int,
        feeds: dict[int, memoryview],
        streams: dict[int, Buffer],
        report: int,
        sealed: dict[int, memoryview],
    ) -> None:
        """Until the first process is over or a limit is reached; then nothing of the program is left alive.

        What is sealed is fed only when the report says that the program has run.
        """
        poll, pidfd, look = select.poll(), -1, SAMPLE_SECONDS
        try:
            pidfd = os.pidfd_open(pid)
            poll.register(pidfd, select.POLLIN)
        except OSError:  # gVisor has none: ask often instead
            look = 0.002
        poll.register(self.control, 0)  # only its end matters: the worker is gone, and so are we
        for fd in streams:
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
            self.total[fd] = 0
        for fd in [*feeds, *sealed]:
            os.set_blocking(fd, False)
        for fd in feeds:
            poll.register(fd, select.POLLOUT)

        cap = int(self.limits["output_bytes"])
        caps = {fd: REPORT_BYTES if fd == report else cap for fd in streams}
        deadline = self._started + self.limits["wall_seconds"]
        check_cpu = self._started + self.limits["cpu_seconds"] / self.limits["cpus"]
        running, sample = True, self._started + SAMPLE_SECONDS
        while running:
            now = time.monotonic()
            if now >= sample:  # before the deadline is checked, which may have passed during a pause
                self._look(now)
                sample = now + SAMPLE_SECONDS
            if now >= deadline:
                self.delay = delay_seconds()
                given = min(self.delay + self.paused, self.limits["patience"])
                deadline = self._started + self.limits["wall_seconds"] + given
                if now >= deadline:
                    self.ended = "wall"
                    break
            if now >= check_cpu:
                left = self.limits["cpu_seconds"] - self.cpu_seconds()
                if left <= 0:
                    self.ended = "cpu"
                    break
                check_cpu = now + max(left / self.limits["cpus"], 0.002)
            for fd, _event in poll.poll(max(0.0, min(deadline - now, check_cpu - now, look)) * 1000 + 1):
                if fd == pidfd:
                    running = False
                elif fd == self.control:
                    os._exit(0)
                elif fd in feeds:
                    if not self._feed(fd, feeds):
                        poll.unregister(fd)
                elif not self._read(fd, streams[fd], caps[fd]):
                    poll.unregister(fd)
                elif fd == report and sealed and bytes(streams[fd].view()).startswith(BORN + READY):
                    feeds, sealed = feeds | sealed, {}
                    for seal in feeds:
                        poll.register(seal, select.POLLOUT)
            if pidfd < 0 and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                running = False
            if any(self.total[fd] > caps[fd] for fd in streams):
                self.ended = "output"
                break
        if pidfd >= 0:
            os.close(pidfd)
        self._end(pid)
        for fd, buffer in streams.items():
            while self.total[fd] <= caps[fd] and self._read(fd, buffer, caps[fd]):
                pass
            os.close(fd)
        for fd in feeds | sealed:
            os.close(fd)

    def cpu_seconds(self) -> float:
        """What the sandbox has used since the start, less our own part of it."""
        cpu, own = self.counters.cpu_seconds(), time.process_time()
        return max(self.reaped_cpu, cpu - self._before["cpu"] - (own - self._before["own"]))

    def numbers(self) -> dict[str, float | int]:
        """What the run used, when it is over."""
        before, peak, pids = self._before, self.counters.peak_bytes(), self.counters.processes_peak()
        return {
            "wall_seconds": time.monotonic() - self._started,
            "delay_seconds": self.delay,
            "paused_seconds": self.paused,
            "cpu_seconds": self.cpu_seconds(),
            # A peak of the cgroup counts all processes together, but is this run's own only if it moved.
            "memory_bytes": max(self.rss, peak - int(before["memory"]) if peak > before["peak"] else 0),
            "oom_kills": self.counters.oom_kills() - int(before["oom"]),
            "processes": max(self.processes, pids - 1 if pids > before["pids"] else 0),
        }

    def _look(self, now: float) -> None:
        """Count the processes, and notice a pause: time has passed in which nothing here used the CPU.

        The CPU time of the sandbox is subtracted, so that a program cannot fake a pause by keeping this loop from the
        CPU. Throttling does not matter, as the quota is renewed in every period. Where the CPU time cannot be read, as
        in gVisor, no pause is noticed.
        """
        self.processes = max(self.processes, self.counters.processes() - 1)
        cpu = self.counters.cpu_seconds()
        idle = now - self._looked - (cpu - self._cpu) / self.limits["cpus"]
        if cpu and idle > PAUSE_SECONDS:
            self.paused += idle
        self._looked, self._cpu = now, cpu

    def _feed(self, fd: int, feeds: dict[int, memoryview]) -> bool:
        """As much as the pipe takes; closed at the end, or when nobody reads. Whether there is more."""
        rest = feeds[fd]
        try:
            while rest:
                rest = rest[os.write(fd, rest[:GULP]) :]
        except BlockingIOError:
            feeds[fd] = rest
            return True
        except BrokenPipeError:
            pass
        os.close(fd)
        feeds.pop(fd)
        return False

    def _read(self, fd: int, buffer: Buffer, cap: int) -> bool:
        """One gulp of a stream; False at its end or when it is dry."""
        room = cap - buffer.size
        try:
            count = buffer.fill(fd, room) if room > 0 else len(os.read(fd, GULP))
        except BlockingIOError:
            return False
        self.total[fd] += count
        return count > 0

    def _end(self, pid: int) -> None:
        """Kill until nobody is left but us, and count what each had used."""
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return
            while True:
                try:
                    ended, status, usage = os.wait4(-1, 0)
                except ChildProcessError:
                    break  # the last one is dying, or not yet handed to us: ask again
                self.reaped_cpu += usage.ru_utime + usage.ru_stime
                self.rss = max(self.rss, usage.ru_maxrss << 10)
                if ended == pid:
                    self.status = status
