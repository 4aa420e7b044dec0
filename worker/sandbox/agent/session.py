"""A session: a sandbox in somebody's hands, with several commands at a time, files that stay, and output as it comes.

Each command has a keeper: a fork of the agent, still root, that feeds it, passes its output on and ends it. A keeper
adopts whatever its command leaves behind, so that all of it can be found and killed without touching what other
commands do; process 1 alone could not tell whose an orphan was. The agent itself only hands requests on to keepers. At
the session's end everything is killed, and the sandbox is emptied and verified as after any job.
"""

import os
import select
import signal
from typing import Any, NamedTuple

from . import kernel, wire
from .keeper import HEEDED, NOT_STARTED, Become, Keeper
from .program import Job, seed
from .words import CLOSE, FEED, INTERRUPT, START


class Kept(NamedTuple):
    """What the agent holds of a keeper."""

    pid: int
    pidfd: int
    """Tells of its end."""
    outbox: int
    """The pipe for its command's input; -1 after the last."""


class Session:
    """A session, from its first frame to its last: starts commands and hands requests on to their keepers."""

    def __init__(
        self, requests: int, replies: int, body: wire.Buffer, counters: kernel.Counters, become: Become
    ) -> None:
        self.requests, self.replies, self.body = requests, replies, body
        self.counters, self.become = counters, become
        self.turn, self.token = os.pipe()
        """A pipe with one byte: whoever has read it may write a frame, since keepers share one stream."""
        os.write(self.token, b".")
        self.keepers: dict[int, Kept] = {}
        """Command → its keeper."""
        self.ends: dict[int, int] = {}
        """The descriptor that tells of a keeper's end → its command."""
        self.poll = select.poll()

    def serve(self) -> Job | None:
        """Answer requests until the session is closed. In a command's own process, return the job to become."""
        self.poll.register(self.requests, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll():
                if fd != self.requests:
                    self._bury(self.ends.pop(fd))
                    self.poll.unregister(fd)
                    continue
                meta = wire.read_frame(self.requests, self.body)
                if meta is None:
                    os._exit(0)
                if meta["op"] == CLOSE:
                    self._close()
                    return None
                job = self._heed(meta)
                if job is not None:
                    return job

    def _heed(self, meta: Any) -> Job | None:
        """Start a command, or tell its keeper something. In a command's own process, return the job to become."""
        command = int(meta["id"])
        if meta["op"] == START:
            try:
                job = self._start(command, meta)
            except BlockingIOError:  # the running commands have all processes that there are
                self.send(command, NOT_STARTED)
                return None
            if job is not None:
                return job
            pidfd = self.keepers[command].pidfd
            self.ends[pidfd] = command
            self.poll.register(pidfd, select.POLLIN)
        elif command in self.keepers:  # else it has ended meanwhile
            self._tell(command, meta)
        self.body.clear()
        return None

    def _start(self, command: int, meta: wire.Start) -> Job | None:
        inbox, outbox = os.pipe()
        seed()
        signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)  # until the keeper is ready to hear of them
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
            os.close(inbox)
            os.close(outbox)
            raise
        if not pid:
            for _, pidfd, other in self.keepers.values():  # a pipe ends only when nobody holds it any more
                os.close(pidfd)
                if other >= 0:
                    os.close(other)
            os.close(outbox)
            os.close(self.requests)
            return Keeper(self, command, meta, inbox).run()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
        os.close(inbox)
        self.keepers[command] = Kept(pid, os.pidfd_open(pid), outbox)
        return None

    def _tell(self, command: int, meta: dict[str, Any]) -> None:
        """Pass input on to a command's keeper, or send the keeper the signal that stands for the request."""
        pid, pidfd, outbox = self.keepers[command]
        if meta["op"] == FEED:
            try:
                wire.write_all(outbox, self.body.view())
            except BrokenPipeError:
                pass  # its keeper has just gone
            if meta["last"] and outbox >= 0:
                os.close(outbox)
                self.keepers[command] = Kept(pid, pidfd, -1)
        else:
            os.kill(pid, signal.SIGINT if meta["op"] == INTERRUPT else signal.SIGTERM)

    def send(self, command: int, meta: dict[str, object], data: bytes = b"") -> None:
        """Send one frame, as the agent or as a keeper, when it is our turn."""
        frame = wire.pack({"id": command, **meta}, len(data))
        os.read(self.turn, 1)
        try:
            wire.write_all(self.replies, frame + data)
        finally:
            os.write(self.token, b".")  # also if the worker is gone: nobody must wait for a turn then

    def _bury(self, command: int) -> None:
        pid, pidfd, outbox = self.keepers.pop(command)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        if outbox >= 0:
            os.close(outbox)
        if status:
            os._exit(1)  # a keeper failed: nothing here can be relied on any more

    def _close(self) -> None:
        """Kill every process and close every descriptor of the session."""
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
