"""A sandbox in somebody's hands: several commands at a time, files that stay, and output as it comes.

Each command has a keeper: a fork of the agent, still root, that feeds it, passes its output on and ends it. A keeper
adopts whatever its command leaves behind, so that all of it can be found and killed without touching what other
commands do; process 1 alone could not tell whose an orphan was. The agent itself only hands requests on to keepers. At
the session's end everything is killed, and the sandbox is emptied and verified as after any job.
"""

import os
import select
import signal

from . import kernel, wire
from .keeper import HEEDED, NOT_STARTED, Become, Keeper
from .program import Job


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
                    try:
                        job = self._start(command, meta)
                    except BlockingIOError:  # the commands that run have all processes there are
                        self.send(command, NOT_STARTED)
                        continue
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
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
            os.close(inbox)
            os.close(outbox)
            raise
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

    def send(self, command: int, meta: dict[str, object], data: bytes = b"") -> None:
        """One frame, by the agent or a keeper, when it is its turn."""
        frame = wire.pack({"id": command, **meta}, len(data))
        os.read(self.turn, 1)
        wire.write_all(self.replies, frame + data)
        os.write(self.token, b".")

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
