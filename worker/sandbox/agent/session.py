"""A sandbox in somebody's hands: several commands at a time, files that stay, and output as it comes.

Each command has a keeper: a fork of the agent, still root, that feeds it, passes its output on and ends it. A keeper
adopts whatever its command leaves behind, so that all of it can be found and killed without touching what other
commands do; process 1 alone could not tell whose an orphan was. The agent itself only hands requests on to keepers. At
the session's end everything is killed, and the sandbox is emptied and verified as after any job.
"""

import os
import select
import signal
import time
from collections.abc import Callable

from . import kernel, wire
from .program import BORN, Job

Become = Callable[[dict[str, object], tuple[int, ...], str], Job]
"""Makes the job of a command, given its five descriptors, and what went wrong before."""

CHUNK = 1 << 15
"""Most bytes of output in one frame."""
SAID_BYTES = 64
LONG_SECONDS = 3600.0
HEEDED = (signal.SIGINT, signal.SIGTERM)
"""What a keeper is told by: to interrupt its command, to end it."""
STDOUT, STDERR, SIDE = 1, 2, 3
"""The streams of a command; the last is a channel of its own, for those that asked for one."""


class Session:
    """What the agent does from a session's first frame to its last."""

    def __init__(
        self, requests: int, replies: int, body: wire.Buffer, counters: kernel.Counters, become: Become
    ) -> None:
        self.requests, self.replies, self.body = requests, replies, body
        self.counters, self.become = counters, become
        self.turn, self.token = os.pipe()
        """Who holds the byte in this pipe may write a frame: keepers share one stream."""
        os.write(self.token, b".")
        self.keepers: dict[int, tuple[int, int, int]] = {}
        """Command → its keeper, a descriptor that tells of its end, and the pipe to it."""

    def serve(self) -> Job | None:
        """Until it is closed. In a command's own process it returns too: with what is to be done there."""
        poll = select.poll()
        seen: dict[int, int] = {}
        poll.register(self.requests, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd != self.requests:
                    self._bury(seen.pop(fd))
                    poll.unregister(fd)
                    continue
                meta = wire.read_frame(self.requests, self.body)
                if meta is None:
                    os._exit(0)
                if meta["op"] == "close":
                    self._close()
                    return None
                command = int(str(meta["id"]))
                if meta["op"] == "start":
                    job = self._start(command, meta)
                    if job is not None:
                        return job
                    pidfd = self.keepers[command][1]
                    seen[pidfd] = command
                    poll.register(pidfd, select.POLLIN)
                elif command in self.keepers:  # else it has ended meanwhile
                    self._tell(command, meta)
                self.body.clear()

    def _start(self, command: int, meta: dict[str, object]) -> Job | None:
        inbox, outbox = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)  # until a keeper is ready to hear of them
        pid = os.fork()
        if not pid:
            for _, pidfd, other in self.keepers.values():  # a pipe ends when nobody holds it any more
                os.close(pidfd)
                if other >= 0:
                    os.close(other)
            os.close(outbox)
            os.close(self.requests)
            return Keeper(self, command, meta, inbox).run()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
        os.close(inbox)
        self.keepers[command] = pid, os.pidfd_open(pid), outbox
        return None

    def _tell(self, command: int, meta: dict[str, object]) -> None:
        """Input, or a signal to its keeper, who knows what it means."""
        pid, _, outbox = self.keepers[command]
        if meta["op"] == "feed":
            try:
                wire.write_all(outbox, self.body.view())
            except BrokenPipeError:
                pass  # its keeper has just gone
            if meta["last"] and outbox >= 0:
                os.close(outbox)
                self.keepers[command] = pid, self.keepers[command][1], -1
        else:
            os.kill(pid, signal.SIGINT if meta["op"] == "interrupt" else signal.SIGTERM)

    def _bury(self, command: int) -> None:
        pid, pidfd, outbox = self.keepers.pop(command)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        if outbox >= 0:
            os.close(outbox)
        if status:
            os._exit(1)  # a keeper that did not end its work: nothing here can be relied on any more

    def _close(self) -> None:
        """Nobody is left, and nothing is held."""
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                break
            try:
                os.wait4(-1, 0)
            except ChildProcessError:
                continue
        for _, pidfd, outbox in self.keepers.values():
            os.close(pidfd)
            if outbox >= 0:
                os.close(outbox)
        os.close(self.turn)
        os.close(self.token)
        self.body.clear()


class Keeper:
    """One command, from the fork to its last dead process; then it ends itself."""

    def __init__(self, session: Session, command: int, meta: dict[str, object], inbox: int) -> None:
        self.session, self.command, self.meta, self.inbox = session, command, meta, inbox
        self.limits: dict[str, float] = meta["limits"]  # type: ignore[assignment]
        self.ended, self.status, self.cpu, self.rss = "itself", int(signal.SIGKILL), 0.0, 0
        self.total = {STDOUT: 0, STDERR: 0, SIDE: 0}
        self.said = b""
        self.waiting = bytearray()

    def run(self) -> Job | None:
        """In the command's own process, what is to be done there."""
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
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
        started, pid = time.monotonic(), os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return self.session.become(self.meta, (stdin_r, stdout_w, stderr_w, report_w, sealed_r), problem)
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
        if file:
            os.unlink(str(file))
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
        """As much input as the pipe takes; its descriptor, or -1 when there is no more, or nobody reads."""
        try:
            while self.waiting and stdin >= 0:
                del self.waiting[: os.write(stdin, self.waiting[: wire.GULP])]
        except BlockingIOError:
            poll.register(stdin, select.POLLOUT)
            return stdin
        except BrokenPipeError:
            more = False
        self.waiting.clear()
        if stdin < 0:
            return -1
        poll.register(stdin, 0)
        if more:
            return stdin
        poll.unregister(stdin)
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
            missing = len(BORN) - len(self.said) if self.meta["side"] else SAID_BYTES
            self.said, data = self.said + data[: max(0, missing)], data[max(0, missing) :]
        self.total[stream] += len(data)
        if data and (stream != SIDE or self.meta["side"]):
            self._send({"stream": stream}, data)
        return True

    def _send(self, meta: dict[str, object], data: bytes = b"") -> None:
        frame = wire.pack({"id": self.command, **meta}, len(data))
        os.read(self.session.turn, 1)
        wire.write_all(self.session.replies, frame + data)
        os.write(self.session.token, b".")

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
