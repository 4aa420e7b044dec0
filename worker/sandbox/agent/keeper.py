"""The one who watches a command of a session: a fork of the agent, still root.

It feeds the command, passes its output on as it comes, stops it in time, and adopts whatever it leaves behind, so that
all of it can be found and killed.
"""

import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from . import kernel, wire
from .program import BORN, Job

NOT_STARTED: dict[str, object] = {
    "ended": "itself", "exit_code": 125, "signal": None, "said": "full", "stdout_total": 0, "stderr_total": 0,
    "wall_seconds": 0, "cpu_seconds": 0, "memory_bytes": 0, "oom_kills": 0,
}  # fmt: skip
"""The end of a command for which there was no process left."""
CHUNK = 1 << 15
"""Most bytes of output in one frame."""
SAID_BYTES = 64
LONG_SECONDS = 3600.0
HEEDED = (signal.SIGINT, signal.SIGTERM)
"""What a keeper is told by: to interrupt its command, to end it."""
STDOUT, STDERR, SIDE = 1, 2, 3
"""The streams of a command; the last is a channel of its own, for those that asked for one."""
Become = Callable[[dict[str, object], tuple[int, ...], str], Job]
"""Makes the job of a command, given its five descriptors, and what went wrong before."""


class Keeper:
    """One command, from the fork to its last dead process; then it ends itself."""

    def __init__(self, session: Any, command: int, meta: dict[str, object], inbox: int) -> None:
        self.session, self.command, self.meta, self.inbox = session, command, meta, inbox
        self.limits: dict[str, float] = meta["limits"]  # type: ignore[assignment]
        self.ended, self.status, self.cpu, self.rss = "itself", int(signal.SIGKILL), 0.0, 0
        self.total = {STDOUT: 0, STDERR: 0, SIDE: 0}
        self.said = b""
        self.waiting = bytearray()

    def run(self) -> Job | None:
        """In the command's own process, what is to be done there."""
        try:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        except OSError:
            raise RuntimeError("the container's kernel has no subreapers, which a session needs") from None
        heard, told = os.pipe()
        for end in (heard, told):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(told)
        for number in HEEDED:
            signal.signal(number, _nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
        oom = self.session.counters.oom_kills()
        (stdin_r, stdin_w), (stdout_r, stdout_w), (stderr_r, stderr_w), (report_r, report_w), (sealed_r, sealed_w) = (
            os.pipe() for _ in range(5)
        )
        file, problem = self.meta["file"], ""
        if file:
            sizes: list[int] = self.meta["sizes"]  # type: ignore[assignment]
            problem = wire.put(str(file), self.session.body.view(sizes[0], sizes[0] + sizes[1]))
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
        streams = {stdout_r: STDOUT, stderr_r: STDERR, report_r: SIDE}
        self._watch(pid, stdin_w, streams, heard, started)
        wall = time.monotonic() - started
        self._end(pid)
        for fd in streams:
            while self._pass_on(fd, streams[fd]):
                pass
        self._clean_up(file)
        self._send(
            {
                "ended": self.ended,
                "exit_code": os.WEXITSTATUS(self.status) if os.WIFEXITED(self.status) else None,
                "signal": os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None,
                "said": self.said.decode("ascii", "replace"),
                "stdout_total": self.total[STDOUT],
                "stderr_total": self.total[STDERR],
                "wall_seconds": wall,
                "cpu_seconds": self.cpu,
                "memory_bytes": self.rss,
                "oom_kills": self.session.counters.oom_kills() - oom,
            }
        )
        os._exit(0)

    def _clean_up(self, file: object) -> None:
        if file:
            try:
                os.unlink(str(file))
            except FileNotFoundError:
                pass  # there was no room for it

    def _watch(self, pid: int, stdin: int, streams: dict[int, int], heard: int, started: float) -> None:
        """Until its first process is over, a limit is reached, or it is to be stopped."""
        poll, pidfd = select.poll(), os.pidfd_open(pid)
        for fd in (pidfd, heard, self.inbox, *streams):
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
        os.set_blocking(stdin, False)
        deadline, cap = started + self.limits["wall_seconds"], self.limits["output_bytes"]
        open_ = True
        while self.ended == "itself":
            if time.monotonic() >= deadline:
                self.ended = "wall"
                break
            for fd, _ in poll.poll(min(max(0.0, deadline - time.monotonic()), LONG_SECONDS) * 1000 + 1):
                if fd == pidfd:
                    os.close(pidfd)
                    return
                if fd == heard:
                    if signal.SIGTERM in os.read(heard, 64):
                        self.ended = "stopped"
                    else:
                        _signal(-pid, signal.SIGINT)
                elif fd == self.inbox:
                    data = os.read(self.inbox, wire.GULP)
                    self.waiting += data
                    open_ = open_ and bool(data)
                    if not data:
                        poll.unregister(self.inbox)
                elif fd in streams and not self._pass_on(fd, streams[fd]):
                    poll.unregister(fd)
                if fd in (self.inbox, stdin):
                    stdin = self._feed(poll, stdin, open_)
            if max(self.total.values()) > cap:
                self.ended = "output"
        os.close(pidfd)

    def _feed(self, poll: "select.poll", stdin: int, more: bool) -> int:
        """As much input as the pipe takes; its descriptor, or -1 when there is no more, or nobody reads. What has been
        taken is told, so that no more comes than a keeper can hold."""
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
        """One gulp of a stream; False at its end, when it is dry, or when it had its share."""
        if self.total[stream] > self.limits["output_bytes"]:
            return False
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            return False
        if stream == SIDE:  # what comes first there is the sign that it was born
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
        while True:
            try:
                while True:
                    ended, status, usage = os.wait4(-1, os.WNOHANG)
                    if not ended:
                        break
                    self.cpu += usage.ru_utime + usage.ru_stime
                    self.rss = max(self.rss, usage.ru_maxrss << 10)
                    if ended == pid:
                        self.status = status
            except ChildProcessError:
                return
            for number in (signal.SIGSTOP, signal.SIGKILL):
                found: set[int] = set()
                while new := kernel.descendants(os.getpid()) - found:
                    found |= new
                    for one in new:
                        _signal(one, number)
            time.sleep(0.001)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _nothing(number: int, frame: object) -> None:
    """A keeper hears of signals through its pipe."""
