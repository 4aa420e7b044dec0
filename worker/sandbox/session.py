"""The worker's side of a session: commands that run side by side in one container, over one stream."""

import asyncio
import itertools
import json
import secrets
from collections import deque
from contextlib import suppress
from typing import Any

from schemas.errors import SandboxLost
from worker.sandbox.agent.keeper import CHUNK
from worker.sandbox.agent.wire import pack
from worker.sandbox.base import SIDE, STDERR, STDOUT, Command, Hear, Outcome, Running, Shape
from worker.sandbox.stream import Stream

GRACE_SECONDS = 30.0
"""How much later than its own deadline a command's end may be told."""
CLOSE_SECONDS = 10.0
PIECE, WINDOW = 1 << 18, 1 << 20
"""Bytes of input in one frame, and on their way to a command at a time."""
UNLIMITED = 1 << 20
"""Seconds of CPU: in a session, only the clock on the wall ends a command."""


class Session:
    """Speaks for as long as the agent is in a session; hears every frame of it."""

    most = CHUNK

    def __init__(self, stream: Stream, request: int, shape: Shape) -> None:
        self._stream, self._request, self._shape = stream, request, shape
        self._numbers = itertools.count(1)
        self._running: dict[int, Remote] = {}
        self._closed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._closing = False
        stream.listener = self
        self.send({"op": "open", "id": request})

    def send(self, meta: dict[str, Any], *parts: bytes) -> None:
        """One frame to the agent."""
        self._stream.send(b"".join((pack(meta, sum(map(len, parts))), *parts)))

    def spawn(self, command: Command, hear: Hear, *, cold: bool) -> Running:
        """Start a command."""
        if not self._stream.alive:
            raise SandboxLost("the sandbox is gone")
        if self._closing or len(self._running) >= max(1, self._shape.commands):
            raise SandboxLost("the session is being closed" if self._closing else "too many commands at a time")
        number, argv = next(self._numbers), command.argv
        file = f"/tmp/main-{secrets.token_hex(4)}.py" if not argv else ""
        env = command.env
        if file and cold:  # no module of the home is loaded before the script, which may be one of ours
            argv, env = ("python3", file), {"PYTHONNOUSERSITE": "1", **env}
        given = {"argv": argv, "args": command.args, "env": env, "files": [*command.files]}
        parts = (json.dumps(given).encode(), command.code, b"", *command.files.values())
        running = self._running[number] = Remote(self, number, command, hear)
        limits = {
            "wall_seconds": command.wall_seconds,
            "output_bytes": command.output_bytes,
            "cpu_seconds": UNLIMITED,
            "processes": self._shape.processes,
            "file_mib": self._shape.disk_mib,
        }
        self.send(
            {
                "op": "start",
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
            },
            *parts,
        )
        return running

    def frame(self, meta: dict[str, Any], body: bytes) -> None:
        """Output of a command, its end, or the session's."""
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
            del self._running[meta["id"]]  # not before: if it was not possible, the command is lost

    def lost(self, why: str) -> None:
        """The sandbox is gone, and every command with it."""
        for running in self._running.values():
            running.lost(why)
        self._running.clear()
        if not self._closed.done():
            self._closed.set_result(False)

    def fail(self, why: str) -> None:
        """The sandbox is not to be trusted any more."""
        self._stream.fail(why)

    async def close(self) -> bool:
        """End it, and whatever runs in it; whether the sandbox is as at birth again."""
        self._closing = True
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for running in list(self._running.values()):
                    running.stop()
                    with suppress(SandboxLost):
                        await asyncio.shield(running.over)
                self.send({"op": "close"})
                return await asyncio.shield(self._closed)
        except (TimeoutError, SandboxLost):
            return False
        except asyncio.CancelledError:
            self.fail("its reset was broken off")  # half of it is no state to go on from
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
        """So much has been taken: there is room for more."""
        self._outstanding -= size
        if self._outstanding < 0:
            raise ValueError("fed")
        while self._input and self._outstanding < WINDOW:
            piece, last = self._input.popleft()
            self._outstanding += len(piece)
            self._tell({"op": "feed", "last": last}, piece)

    def interrupt(self) -> None:
        self._tell({"op": "interrupt"})

    def stop(self) -> None:
        self._tell({"op": "stop"})

    def heard(self, stream: int, data: bytes) -> None:
        """Output; no more of it than was agreed."""
        self._total[stream] += len(data)
        if self._total[stream] > self._command.output_bytes + CHUNK:
            raise ValueError("output")
        self._hear(stream, data)

    def ended(self, meta: dict[str, Any]) -> None:
        """The end, believed where it is possible."""
        self._overdue.cancel()
        if meta.get("said") == "full":
            self._hear(STDERR, b"it could not be started: the sandbox has no process left\n")
        if meta["ended"] not in ("itself", "wall", "output", "stopped"):
            raise ValueError("ended")
        outcome = Outcome(checked=False, said="", stdout=b"", stderr=b"", processes=1, **told(meta))
        if not self.over.done():
            self.over.set_result(outcome)

    def lost(self, why: str) -> None:
        """The sandbox is gone."""
        self._overdue.cancel()
        if not self.over.done():
            self.over.set_exception(SandboxLost(why))

    def _tell(self, meta: dict[str, Any], *parts: bytes) -> None:
        if not self.over.done():
            self._session.send({**meta, "id": self._number}, *parts)

    def _give_up(self) -> None:
        self._session.fail("a command's end was not told in time")


def told(reply: dict[str, Any]) -> dict[str, Any]:
    """How a program or a command ended, and what was counted of it: each value believed where it is possible."""
    return {
        "ended": reply["ended"],
        "exit_code": small(reply, "exit_code"),
        "signal": small(reply, "signal"),
        "stdout_total": count(reply, "stdout_total"),
        "stderr_total": count(reply, "stderr_total"),
        "wall_seconds": seconds(reply, "wall_seconds"),
        "cpu_seconds": seconds(reply, "cpu_seconds"),
        "memory_bytes": count(reply, "memory_bytes"),
        "oom_kills": count(reply, "oom_kills"),
    }


def count(reply: dict[str, Any], name: str) -> int:
    """A number that the agent counted."""
    value = reply[name]
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(name)
    return value


def small(reply: dict[str, Any], name: str) -> int | None:
    """An exit code or a signal, if there is one."""
    return None if reply[name] is None else count(reply, name) & 0xFF


def seconds(reply: dict[str, Any], name: str) -> float:
    """A time that the agent took."""
    value = reply[name]
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise ValueError(name)
    return float(value)
