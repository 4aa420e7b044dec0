"""The worker's side of a session: commands that run side by side in one container, over one stream."""

import asyncio
import itertools
import json
import secrets
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from evalpool.schemas.errors import SandboxLost
from evalpool.worker.sandbox.agent.keeper import CHUNK
from evalpool.worker.sandbox.agent.wire import Given, Start, pack
from evalpool.worker.sandbox.agent.words import CLOSE, FEED, FULL, INTERRUPT, OPEN, START, STOP
from evalpool.worker.sandbox.base import SIDE, STDERR, STDOUT, Command, End, Hear, Note, Outcome, Running, Shape
from evalpool.worker.sandbox.hardening import stack_bytes
from evalpool.worker.sandbox.replies import count, ending
from evalpool.worker.sandbox.stream import Stream

GRACE_SECONDS = 30.0
"""How long after its own deadline a command may still run before the sandbox is given up."""
CLOSE_SECONDS = 10.0
"""How long ending a session may take."""
PIECE, WINDOW = 1 << 18, 1 << 20
"""Bytes of input in one frame, and bytes that may be on their way to a command at a time."""
UNLIMITED = 1 << 20
"""Seconds of CPU time: in a session, only the wall clock ends a command."""


class Session:
    """Sends the frames of a session and hears those that the agent sends."""

    most = CHUNK

    def __init__(self, stream: Stream, request: int, shape: Shape) -> None:
        self._stream, self._request, self._shape = stream, request, shape
        self._numbers = itertools.count(1)
        self._running: dict[int, Remote] = {}
        self._closed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._closing = False
        stream.listener = self
        self.send({"op": OPEN, "id": request})

    def send(self, meta: Mapping[str, Any], *parts: bytes) -> None:
        """Send one frame to the agent."""
        self._stream.send(pack(meta, sum(map(len, parts))), *parts)

    def spawn(self, command: Command, hear: Hear, *, cold: bool) -> Running:
        """Start a command."""
        if not self._stream.alive:
            raise SandboxLost("the sandbox is gone")
        if self._closing or len(self._running) >= max(1, self._shape.commands):
            raise SandboxLost("the session is being closed" if self._closing else "too many commands run at a time")
        number, argv = next(self._numbers), command.argv
        file = f"/tmp/main-{secrets.token_hex(4)}.py" if not argv else ""
        env = command.env
        if file and cold:  # the script may be one of ours, and no module of the home must be loaded before it
            argv, env = ("python3", file), {"PYTHONNOUSERSITE": "1", **env}
        given = Given(argv=argv, args=command.args, env=env, files=[*command.files])
        parts = (command.code, *command.files.values(), json.dumps(given).encode(), b"")
        running = self._running[number] = Remote(self, number, command, hear)
        limits = {
            "wall_seconds": command.wall_seconds,
            "output_bytes": command.output_bytes,
            "cpu_seconds": UNLIMITED,
            "processes": self._shape.processes,
            "file_mib": self._shape.disk_mib,
            "stack_bytes": stack_bytes(self._shape),
        }
        request: Start = {
            "op": START,
            "id": number,
            "cwd": f"{self._shape.home}/{command.cwd}",
            "file": file,
            "side": command.side,
            "limits": limits,
            "checked": False,
            "tools": (),
            "guarded": False,
            "subject": None,
            "sizes": [len(part) for part in parts],
        }
        self.send(request, *parts)
        return running

    def frame(self, meta: dict[str, Any], body: bytes) -> None:
        """Take a frame: output of a command, its end, or the end of the session."""
        if "dirty" in meta and meta["id"] == self._request and not self._running:
            self._stream.listener = None
            if not self._closed.done():
                self._closed.set_result(meta["dirty"] == "")
            return
        running = self._running[meta["id"]]
        if "fed" in meta:
            running.fed(count(meta, "fed"))
        elif "stream" in meta:
            running.heard(meta["stream"], body)
        else:
            running.ended(meta)
            del self._running[meta["id"]]  # only now: if that end was impossible, the command is lost with the sandbox

    def lost(self, why: str) -> None:
        """End every command with `SandboxLost`."""
        for running in self._running.values():
            running.lost(why)
        self._running.clear()
        if not self._closed.done():
            self._closed.set_result(False)

    def fail(self, why: str) -> None:
        """Give the sandbox up."""
        self._stream.fail(why)

    async def close(self) -> bool:
        """End the session and whatever runs in it; return whether the sandbox is as it was at birth."""
        self._closing = True
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for running in list(self._running.values()):
                    running.stop()
                    with suppress(SandboxLost):
                        await asyncio.shield(running.over)
                self.send({"op": CLOSE})
                return await asyncio.shield(self._closed)
        except (TimeoutError, SandboxLost):
            return False
        except asyncio.CancelledError:
            self.fail("the reset of the sandbox was cancelled")  # and nobody knows how far it came
            raise


class Remote(Running):
    """A command in the container."""

    def __init__(self, session: Session, number: int, command: Command, hear: Hear) -> None:
        super().__init__()
        self._session, self._number, self._command, self._hear = session, number, command, hear
        self._total = {STDOUT: 0, STDERR: 0, SIDE: 0}
        self._input: deque[tuple[bytes, bool]] = deque()
        self._outstanding = 0
        wait = command.wall_seconds + GRACE_SECONDS
        self._overdue = asyncio.get_running_loop().call_later(wait, self._give_up)

    def feed(self, data: bytes, *, last: bool = False) -> None:
        for start in range(0, max(1, len(data)), PIECE):
            self._input.append((data[start : start + PIECE], last and start + PIECE >= len(data)))
        self.fed(0)

    def fed(self, size: int) -> None:
        """Send more input, as `size` bytes of it have been taken."""
        self._outstanding -= size
        if self._outstanding < 0:
            raise ValueError("fed")
        while self._input and self._outstanding < WINDOW:
            piece, last = self._input.popleft()
            self._outstanding += len(piece)
            self._tell({"op": FEED, "last": last}, piece)

    def interrupt(self) -> None:
        self._tell({"op": INTERRUPT})

    def stop(self) -> None:
        self._tell({"op": STOP})

    def heard(self, stream: int, data: bytes) -> None:
        """Pass output on; raise `ValueError` for more than was agreed."""
        self._total[stream] += len(data)
        if self._total[stream] > self._command.output_bytes + CHUNK:
            raise ValueError("output")
        self._hear(stream, data)

    def ended(self, meta: dict[str, Any]) -> None:
        """Take the end of the command; raise `ValueError` for one that is not possible."""
        self._overdue.cancel()
        if meta.get("said") == FULL.decode():
            self._hear(STDERR, b"the command could not be started: the sandbox has no process left\n")
        if meta["ended"] not in (End.ITSELF, End.WALL, End.OUTPUT, End.STOPPED):
            raise ValueError("ended")
        outcome = Outcome(checked=False, note=Note.NONE, stdout=b"", stderr=b"", processes=1, **ending(meta))
        if not self.over.done():
            self.over.set_result(outcome)

    def lost(self, why: str) -> None:
        """End the command with `SandboxLost`."""
        self._overdue.cancel()
        if not self.over.done():
            self.over.set_exception(SandboxLost(why))

    def _tell(self, meta: dict[str, Any], *parts: bytes) -> None:
        if not self.over.done():
            self._session.send({**meta, "id": self._number}, *parts)

    def _give_up(self) -> None:
        self._session.fail("the agent did not report the end of a command in time")
