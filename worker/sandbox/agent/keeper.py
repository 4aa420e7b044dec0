"""The keeper, which watches one command of a session: a fork of the agent, still root.

A keeper feeds its command, passes the output on as it comes, stops the command in time, and adopts whatever it leaves
behind, so that all of it can be found and killed.
"""

import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from . import kernel, wire
from .program import Job
from .words import BORN, FULL, NOT_BORN, SIDE, STDERR, STDOUT

NOT_STARTED: dict[str, object] = {
    **wire.ended("itself", NOT_BORN << 8, FULL, 0, 0),
    "wall_seconds": 0, "cpu_seconds": 0, "memory_bytes": 0, "oom_kills": 0,
}  # fmt: skip
"""The end of a command that could not be started, because no process was left for it."""
CHUNK = 1 << 15
"""Bytes of output in one frame, at most."""
SAID_BYTES = 64
"""Bytes of the report that are kept of a command that has no side channel."""
LONG_SECONDS = 3600.0
"""How long a keeper waits at a time, at most: `poll` takes no longer waits than 24 days."""
HEEDED = (signal.SIGINT, signal.SIGTERM)
"""The signals that tell a keeper to interrupt its command, and to end it."""
Become = Callable[[wire.Start, tuple[int, ...], str], Job]
"""Makes the job of a command from its request, its five descriptors, and a problem that arose before."""


class Keeper:
    """One command, from the fork to the command's last dead process; then the keeper exits."""

    def __init__(self, session: Any, command: int, meta: wire.Start, inbox: int) -> None:
        self.session, self.command, self.meta, self.inbox = session, command, meta, inbox
        self.limits = meta["limits"]
        self.ended, self.status, self.cpu, self.rss = "itself", int(signal.SIGKILL), 0.0, 0
        self.total = {STDOUT: 0, STDERR: 0, SIDE: 0}
        self.said = b""
        self.waiting, self.more, self.stdin = bytearray(), True, -1
        """Input that the command has not taken yet; whether more may come; and the pipe for it."""

    def run(self) -> Job | None:
        """Start the command, watch it and tell its end. Only the command's own process returns, with its job."""
        try:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        except OSError:
            raise RuntimeError("the container's kernel has no subreapers, which a session needs") from None
        heard = _listen()
        oom = self.session.counters.oom_kills()
        (stdin_r, stdin_w), (stdout_r, stdout_w), (stderr_r, stderr_w), (report_r, report_w), (sealed_r, sealed_w) = (
            os.pipe() for _ in range(5)
        )
        file, problem = self.meta["file"], ""
        if file:
            problem = wire.put(file, self.session.body.view(0, self.meta["sizes"][0]))
        started = time.monotonic()
        try:
            pid = os.fork()
        except BlockingIOError:
            self._send(NOT_STARTED)
            self._clean_up(file)
            os._exit(0)
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            become: Become = self.session.become
            return become(self.meta, (stdin_r, stdout_w, stderr_w, report_w, sealed_r), problem)
        for fd in (stdin_r, stdout_w, stderr_w, report_w, sealed_r, sealed_w):
            os.close(fd)
        self.session.body.clear()
        self.stdin, streams = stdin_w, {stdout_r: STDOUT, stderr_r: STDERR, report_r: SIDE}
        self._watch(pid, streams, heard, started)
        wall = time.monotonic() - started
        self._end(pid)
        for fd in streams:
            while self._pass_on(fd, streams[fd]):
                pass
        self._clean_up(file)
        self._send(
            {
                **wire.ended(self.ended, self.status, self.said, self.total[STDOUT], self.total[STDERR]),
                "wall_seconds": wall,
                "cpu_seconds": self.cpu,
                "memory_bytes": self.rss,
                "oom_kills": self.session.counters.oom_kills() - oom,
            }
        )
        os._exit(0)

    def _clean_up(self, file: str) -> None:
        if file:
            try:
                os.unlink(file)
            except FileNotFoundError:
                pass  # there was no room for it

    def _watch(self, pid: int, streams: dict[int, int], heard: int, started: float) -> None:
        """Wait until the first process ends, a limit is reached, or the command is to be stopped."""
        poll, pidfd = select.poll(), os.pidfd_open(pid)
        for fd in (pidfd, heard, self.inbox, *streams):
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
        os.set_blocking(self.stdin, False)
        deadline, cap = started + self.limits["wall_seconds"], self.limits["output_bytes"]
        while self.ended == "itself":
            if time.monotonic() >= deadline:
                self.ended = "wall"
                break
            for fd, _ in poll.poll(min(max(0.0, deadline - time.monotonic()), LONG_SECONDS) * 1000 + 1):
                if fd == pidfd:
                    os.close(pidfd)
                    return
                if fd == heard:
                    self._heed(pid, heard)
                elif fd in streams:
                    if not self._pass_on(fd, streams[fd]):
                        poll.unregister(fd)
                else:
                    self._take(poll, fd)
            if max(self.total.values()) > cap:
                self.ended = "output"
        os.close(pidfd)

    def _heed(self, pid: int, heard: int) -> None:
        """Stop or interrupt the command, as the agent has told us by a signal."""
        if signal.SIGTERM in os.read(heard, 64):
            self.ended = "stopped"
        else:
            _signal(-pid, signal.SIGINT)

    def _take(self, poll: "select.poll", fd: int) -> None:
        """Take input from the agent, if `fd` is where it comes from, and pass on what the command has room for."""
        if fd == self.inbox:
            data = os.read(self.inbox, wire.GULP)
            self.waiting += data
            self.more = self.more and bool(data)
            if not data:
                poll.unregister(self.inbox)
        self.stdin = self._feed(poll, self.stdin, self.more)

    def _feed(self, poll: "select.poll", stdin: int, more: bool) -> int:
        """Write as much input as the pipe takes. Return its descriptor, or -1 after the last input and when nobody
        reads. The worker is told how much was taken, so that no more comes than a keeper can hold."""
        before = len(self.waiting)
        if stdin >= 0:
            try:
                while self.waiting:
                    del self.waiting[: os.write(stdin, self.waiting[: wire.GULP])]
            except BlockingIOError:
                poll.register(stdin, select.POLLOUT)
            except BrokenPipeError:
                more = False
                self.waiting.clear()
        else:
            self.waiting.clear()
        if before > len(self.waiting):
            self._send({"fed": before - len(self.waiting)})
        if stdin < 0 or self.waiting:
            return stdin
        try:
            poll.unregister(stdin)
        except KeyError:
            pass
        if more:
            return stdin
        os.close(stdin)
        return -1

    def _pass_on(self, fd: int, stream: int) -> bool:
        """Pass on one gulp of a stream; return False at its end, when nothing is there, or when it had its share."""
        if self.total[stream] > self.limits["output_bytes"]:
            return False
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            return False
        if stream == SIDE:  # whose first word is the sign that the command was born
            missing = max(0, (len(BORN) if self.meta["side"] else SAID_BYTES) - len(self.said))
            self.said, data = self.said + data[:missing], data[missing:]
        self.total[stream] += len(data)
        if data and (stream != SIDE or self.meta["side"]):
            self._send({"stream": stream}, data)
        return True

    def _send(self, meta: dict[str, object], data: bytes = b"") -> None:
        self.session.send(self.command, meta, data)

    def _end(self, pid: int) -> None:
        """Stop whatever the command started, so that none of it can fork any more; kill it; count what it had used."""
        while self._reap(pid):
            for number in (signal.SIGSTOP, signal.SIGKILL):
                found: set[int] = set()
                while new := kernel.descendants(os.getpid()) - found:
                    found |= new
                    for one in new:
                        _signal(one, number)
            time.sleep(0.001)

    def _reap(self, pid: int) -> bool:
        """Count what processes that have ended had used; return whether any process is left."""
        try:
            while True:
                ended, status, usage = os.wait4(-1, os.WNOHANG)
                if not ended:
                    return True
                self.cpu += usage.ru_utime + usage.ru_stime
                self.rss = max(self.rss, usage.ru_maxrss << 10)
                if ended == pid:
                    self.status = status
        except ChildProcessError:
            return False


def _listen() -> int:
    """Return a pipe from which a keeper reads the signals that the agent sends."""
    heard, told = os.pipe()
    for end in (heard, told):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(told)
    for number in HEEDED:
        signal.signal(number, _nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
    return heard


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _nothing(number: int, frame: object) -> None:
    """Handle a signal by doing nothing: a keeper reads of signals from its pipe."""
