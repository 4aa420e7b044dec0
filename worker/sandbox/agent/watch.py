"""The agent's side of the fork: feed the program, read it, stop it in time, and count what it used."""

import fcntl
import os
import select
import signal
import time

from .kernel import Counters, runnable
from .wire import GULP, Buffer
from .words import BEGUN, BORN, READY

REPORT_BYTES = 64
"""Bytes of the report that are read; the harness writes fewer."""
SAMPLE_SECONDS = 0.05
"""How often, at least, the number of processes is looked at."""
SIP = GULP // 4
"""Bytes. A smaller read was hardly worth waking up for."""
NAP_SECONDS = 0.002
"""How long a stream is left alone after a sip, so that a program with many small writes is read in few gulps."""
ROOM = 1 << 18
"""Bytes that a program can write during such a nap before it has to wait for us."""
INPUT_ROOM = 1 << 20
"""Bytes of a large input that are put into the pipe at once, so that nobody has to wake up for them again."""
IDLE = 0.2
"""A share of the time. We look whether something in the sandbox is ready to run only if it used no CPU for longer."""
PAUSE_SECONDS = 0.5
"""If nothing in the sandbox ran for longer, not even this loop, the sandbox was paused from outside. Shorter gaps may
come from the CPU quota: a throttled sandbox stops for up to a tenth of a second."""


class Watch:
    """One run, from the fork to the last dead process."""

    def __init__(self, counters: Counters, control: int, limits: dict[str, float]) -> None:
        self.counters, self.control, self.limits = counters, control, limits
        self.ended = "itself"
        """What ended the program: itself, or the limit that it reached: cpu, wall, output."""
        self.status: int = signal.SIGKILL
        """The status of the program's first process, as `wait4` gives it."""
        self.reaped_cpu = 0.0
        """Seconds of CPU time that `wait4` counted for all processes together."""
        self.rss = 0
        """The largest resident set of any one process, in bytes."""
        self.processes = 1
        """The largest number of processes seen alive at once."""
        self.total: dict[int, int] = {}
        """Bytes read of each stream, kept or not."""
        self._delay = 0.0
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
        """Watch until the first process ends or a limit is reached; then leave nothing of the program alive.

        `sealed` is fed only when the report says that the program has run.
        """
        self._feeds, self._streams, self._report, self._sealed = feeds, streams, report, sealed
        look = self._register(pid)
        cap = int(self.limits["output_bytes"])
        self._caps = {fd: REPORT_BYTES if fd == report else cap for fd in streams}
        self._deadline = self._started + self.limits["wall_seconds"]
        self._check_cpu = self._started + self.limits["cpu_seconds"] / self.limits["cpus"]
        sample = self._started + SAMPLE_SECONDS
        self._napping: list[int] = []
        """Streams that are not looked at before `_waking`."""
        self._waking, self._wide = 0.0, set[int]()
        running = True
        while running:
            now = time.monotonic()
            if now >= sample:  # before the deadline is checked, which may have passed during a pause
                self._look(now)
                sample = now + SAMPLE_SECONDS
            if self._late(now):
                break
            for fd, _event in self._poll.poll(self._wait(now, look)):
                if fd == self._pidfd:
                    running = False
                else:
                    self._serve(fd)
            if self._pidfd < 0 and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                running = False
            if any(self.total[fd] > self._caps[fd] for fd in streams):
                self.ended = "output"
                break
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._end(pid)
        for fd, buffer in streams.items():
            while self.total[fd] <= self._caps[fd] and self._read(fd, buffer, self._caps[fd]):
                pass
            os.close(fd)
        for fd in self._feeds | self._sealed:
            os.close(fd)

    def _register(self, pid: int) -> float:
        """Make every descriptor ready to be polled; return the seconds after which to look without being woken."""
        self._poll, self._pidfd, look = select.poll(), -1, SAMPLE_SECONDS
        try:
            self._pidfd = os.pidfd_open(pid)
            self._poll.register(self._pidfd, select.POLLIN)
        except OSError:  # gVisor has no such descriptors, so we ask often instead
            look = 0.002
        self._poll.register(self.control, 0)  # only its end matters: the worker is gone, and so are we
        for fd in self._streams:
            os.set_blocking(fd, False)
            self._poll.register(fd, select.POLLIN)
            self.total[fd] = 0
        for fd in [*self._feeds, *self._sealed]:
            os.set_blocking(fd, False)
        for fd, data in self._feeds.items():
            if len(data) > GULP:
                _widen(fd, min(len(data), INPUT_ROOM))
            self._poll.register(fd, select.POLLOUT)
        return look

    def _late(self, now: float) -> bool:
        """Return whether a limit of time is reached, and set the times at which to look for that again."""
        if now >= self._deadline:
            given = min(self.delay + self.paused, self.limits["patience"])
            self._deadline = self._started + self.limits["wall_seconds"] + given
            if now >= self._deadline:
                self.ended = "wall"
                return True
        if now >= self._check_cpu:
            left = self.limits["cpu_seconds"] - self.cpu_seconds()
            if left <= 0:
                self.ended = "cpu"
                return True
            self._check_cpu = now + max(left / self.limits["cpus"], 0.002)
        return False

    def _wait(self, now: float, look: float) -> float:
        """Return how many milliseconds to wait at most, after streams whose nap is over have been woken."""
        if self._napping and now >= self._waking:
            for fd in self._napping:
                self._poll.register(fd, select.POLLIN)
            self._napping = []
        wait = min(self._deadline - now, self._check_cpu - now, look) * 1000 + 1
        if self._napping:
            wait = min(wait, (self._waking - now) * 1000)
        return max(0.0, wait)

    def _serve(self, fd: int) -> None:
        """Feed or read a descriptor that is ready."""
        if fd == self.control:
            os._exit(0)
        elif fd in self._feeds:
            if not self._feed(fd):
                self._poll.unregister(fd)
        elif not (count := self._read(fd, self._streams[fd], self._caps[fd])):
            self._poll.unregister(fd)
        elif fd != self._report:
            if count < SIP:
                self._nap(fd, first=self.total[fd] == count)
        elif self._sealed and bytes(self._streams[fd].view()).startswith(BORN + BEGUN + READY):
            self._feeds, self._sealed = self._feeds | self._sealed, {}
            for seal in self._feeds:
                self._poll.register(seal, select.POLLOUT)

    def _nap(self, fd: int, *, first: bool) -> None:
        """Leave a stream alone for a moment, with more room in its pipe if this was not the first read of it."""
        self._poll.unregister(fd)
        self._napping.append(fd)
        self._waking = time.monotonic() + NAP_SECONDS
        if not first and fd not in self._wide:  # not for programs that write once, which are most
            self._wide.add(fd)
            _widen(fd, ROOM)

    def agent_seconds(self) -> float:
        """Return the CPU time that we ourselves have used since the start."""
        return time.process_time() - self._before["own"]

    def cpu_seconds(self) -> float:
        """Return the CPU time that the sandbox has used since the start, less our own part of it."""
        cpu, own = self.counters.cpu_seconds(), self.agent_seconds()
        return max(self.reaped_cpu, cpu - self._before["cpu"] - own)

    def numbers(self) -> dict[str, float | int]:
        """Return what the run has used, when it is over, as the keys of a reply."""
        before, peak, pids = self._before, self.counters.peak_bytes(), self.counters.processes_peak()
        return {
            "wall_seconds": time.monotonic() - self._started,
            "delay_seconds": self.delay,
            "paused_seconds": self.paused,
            "cpu_seconds": self.cpu_seconds(),
            "agent_seconds": self.agent_seconds(),
            # A peak of the cgroup counts all processes together, but is this run's own only if it moved.
            "memory_bytes": max(self.rss, peak - int(before["memory"]) if peak > before["peak"] else 0),
            "oom_kills": self.counters.oom_kills() - int(before["oom"]),
            "processes": max(self.processes, pids - 1 if pids > before["pids"] else 0),
        }

    def _look(self, now: float) -> None:
        """Count the processes, and notice time in which the program could not run.

        The CPU time of the sandbox is subtracted, so that a program can fake neither a pause, by keeping this loop from
        the CPU, nor starvation, by having its processes wait for each other. Where the CPU time cannot be read, as in
        gVisor, nothing is noticed.
        """
        self.processes = max(self.processes, self.counters.processes() - 1)
        cpu, cpus = self.counters.cpu_seconds(), self.limits["cpus"]
        passed, used = now - self._looked, cpu - self._cpu
        self._looked, self._cpu = now, cpu
        if not cpu:
            return
        # Throttling does not matter here, as the quota is renewed in every period.
        if passed - used / cpus > PAUSE_SECONDS:
            self.paused += passed - used / cpus
            return
        # A program that waits because it has used up its quota had more than its share before, so that is subtracted.
        idle = passed - used / min(1.0, cpus)
        if idle < 0:
            self._delay += idle
        elif idle > IDLE * passed and self._all_alive():
            # One that is ready to run at this moment is taken to have been so all the time, and one that is not, never.
            # On average that is right, also for a program that sleeps and computes in turns.
            self._delay += idle if runnable() else idle - passed

    @property
    def delay(self) -> float:
        """Seconds in which the program was ready to run while others had the CPU, as far as regular looks can tell."""
        return max(0.0, self._delay)

    def _all_alive(self) -> bool:
        """Return whether the kernel has killed nothing for memory. A process that it has killed may not have given its
        memory back yet: to look around takes some more, and the kernel might kill us for it."""
        return self.counters.oom_kills() == self._before["oom"]

    def _feed(self, fd: int) -> bool:
        """Write what as the pipe takes, and close it at the end or when nobody reads. Return whether more is left."""
        rest = self._feeds[fd]
        try:
            while rest:
                rest = rest[os.write(fd, rest[:GULP]) :]
        except BlockingIOError:
            self._feeds[fd] = rest
            return True
        except BrokenPipeError:
            pass
        os.close(fd)
        self._feeds.pop(fd)
        return False

    def _read(self, fd: int, buffer: Buffer, cap: int) -> int:
        """Read one gulp of a stream; return its bytes' number, which is 0 at the end and when nothing is there."""
        room = cap - buffer.size
        try:
            count = buffer.fill(fd, room) if room > 0 else len(os.read(fd, GULP))
        except BlockingIOError:
            return 0
        self.total[fd] += count
        return count

    def _end(self, pid: int) -> None:
        """Kill until no process is left but us, and count what each one has used."""
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


def _widen(fd: int, size: int) -> None:
    """Let a pipe hold `size` bytes where that is allowed: all pipes of all agents together have a limit, too."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)
    except OSError:
        pass
