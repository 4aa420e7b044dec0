"""A Python interpreter that stays: cells share their state, and show more than text."""

import asyncio
import json
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import ijson
from pydantic import Field

from schemas.errors import SandboxLost
from schemas.job import Case, JobSpec
from schemas.sandbox import LONGEST_SECONDS, ExecutionStatus, ToolResult
from worker.sandbox.base import SIDE, STDERR, STDOUT, Command, Program, Running
from worker.tools.base import JobTool, Place, Seconds, ToolParameters, files_of
from worker.tools.cell import Cell
from worker.tools.files import ISOLATED
from worker.tools.registry import register_tool

START_SECONDS = 30.0
GRACE_SECONDS = 2.0
"""How long a cell that was interrupted may take to end, and the state it had is kept."""
BARRIER_SECONDS = 1.0
CELL_BYTES, IDLE_BYTES = 64 << 20, 4 << 20
"""What may come of one cell beside its output; and of threads that it has left behind, until the next."""
DISPLAYS = 1000
"""Most that one cell can show."""
SMALL, PARTS = 1 << 16, 4096
"""Bytes of a message that is read at once; and what a larger one may consist of."""
ENDED = "The interpreter had ended since the last cell: what earlier cells defined is lost."
ENV = {"MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}


@lru_cache(maxsize=1)
def source() -> str:
    """The program that runs inside: two modules of ours as one text."""
    mime, kernel = (Path(__file__).with_name(name).read_text() for name in ("mime.py", "kernel.py"))
    apart = re.compile(r"^from (__future__|worker\.tools\.mime) import .*\n", re.MULTILINE)
    return "from __future__ import annotations\n" + ISOLATED + apart.sub("", mime + kernel)


class Kernel:
    """One interpreter in a sandbox, started when it is needed. It runs one cell at a time; others wait their turn.

    What it says is the word of the code that runs in it: it is passed on, and nothing here depends on it.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._running: Running | None = None
        self._cell: Cell | None = None
        """The one that runs, or that nobody waits for any more."""
        self._number = 0
        self._line = bytearray()
        self._room = 0
        """Bytes that may still come beside a cell's output; or in all, while none runs."""
        self._barrier = b""
        self._passed: set[int] = set()
        self._tail = {STDOUT: b"", STDERR: b""}
        self._changed = asyncio.Event()
        self._ready = self._done = self._interrupted = self._abandoned = False

    async def run(self, place: Place, code: str, timeout: float) -> Cell:
        """One cell. Where it does not end in time it is interrupted; where that does not help, the state is lost."""
        async with self._lock:
            cell = Cell(place.config.resource_limits.output_bytes)
            if self._abandoned and not await self._within(GRACE_SECONDS, lambda: self._done):
                await self._end()
                cell.state, cell.note = "lost", ENDED
            self._abandoned, self._cell = False, None
            if self._dead():
                if self._running is not None:  # it has ended by itself since the last cell
                    cell.state, cell.note = "lost", ENDED
                await self._start(place)
            try:
                await self._execute(cell, code, timeout)
            except asyncio.CancelledError:  # whoever waited is gone: the cell must not run on, but the state may stay
                self._abandoned = True
                if self._running is not None:
                    self._running.interrupt()
                raise
            self._cell, self._room = None, IDLE_BYTES
            return cell

    async def interrupt(self) -> bool:
        """As Control-C would; whether there was a cell to interrupt."""
        if self._running is None or self._cell is None or self._done:
            return False
        self._interrupted = True
        self._running.interrupt()
        return True

    async def restart(self) -> None:
        """Forget everything. A cell that runs is ended."""
        if self._cell is not None:
            self._cell.note = "The kernel was restarted while the cell ran."
        await self._end()

    async def _start(self, place: Place) -> None:
        self._line.clear()
        self._ready, self._room = False, IDLE_BYTES
        command = Command(
            argv=("python3", "-c", source()), env=ENV | place.config.env_vars, side=True, wall_seconds=LONGEST_SECONDS,
            output_bytes=1 << 50,
        )  # fmt: skip
        self._running = await place.spawn(command, self._hear)
        self._running.over.add_done_callback(lambda _: self._changed.set())
        if not await self._within(START_SECONDS, lambda: self._ready):
            await self._end()
            raise SandboxLost("the notebook's interpreter did not start")

    async def _within(self, seconds: float, reached: Callable[[], bool]) -> bool:
        """Wait until it is so, or the interpreter is dead, or it takes too long; whether it is so."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not reached() and self._running is not None and not self._running.over.done():
                    self._changed.clear()
                    await self._changed.wait()
        return reached()

    async def _execute(self, cell: Cell, code: str, timeout: float) -> None:
        assert self._running is not None
        self._number += 1
        token = secrets.token_hex(12)
        self._barrier, self._passed = b"\0" + token.encode() + b"\n", set()
        self._tail = {STDOUT: b"", STDERR: b""}
        self._cell, self._room, self._done, self._interrupted = cell, CELL_BYTES, False, False
        self._line.clear()
        request = {"id": self._number, "code": code, "barrier": token}
        self._running.feed(json.dumps(request).encode() + b"\n")
        if not await self._within(timeout, lambda: self._done) and not self._dead():
            cell.status = ExecutionStatus.TIMEOUT  # let it end by itself, with its state
            self._running.interrupt()
            if not await self._within(GRACE_SECONDS, lambda: self._done):
                await self._end()
        if self._done:
            await self._within(BARRIER_SECONDS, lambda: self._passed >= {STDOUT, STDERR})  # if the cell has let them
        else:
            self._lost(cell)
        if cell.status is ExecutionStatus.TIMEOUT:
            kept = "the variables of earlier cells are kept" if cell.state == "kept" else "all variables are lost"
            cell.note = f"Execution timed out after {timeout:g} seconds; {kept}."
        elif cell.truncated and cell.status is not ExecutionStatus.SUCCESS:
            cell.trouble = None  # how we have stopped it
            cell.note = f"It was stopped: it wrote more than {cell.cap:,} bytes to one stream, or showed too much."

    def _dead(self) -> bool:
        return self._running is None or self._running.over.done()

    def _lost(self, cell: Cell) -> None:
        cell.state = "lost"
        if cell.status is ExecutionStatus.SUCCESS:
            cell.status = ExecutionStatus.ERROR
        if cell.status is ExecutionStatus.ERROR and cell.note in ("", ENDED):
            cell.note = "The interpreter died, and with it all variables."
            over = self._running.over if self._running else None
            if over is not None and over.done() and (over.exception() or over.result().ended == "stopped"):
                cell.status = ExecutionStatus.CANCELLED
                cell.note = "The sandbox has ended or was reset, and with it all variables."
            elif over is not None and over.done() and over.result().oom_kills:
                cell.note = "The interpreter was killed for memory, and with it all variables are lost."

    def _hear(self, stream: int, data: bytes) -> None:
        if stream == SIDE or self._cell is None:
            self._room -= len(data)
            if self._room < 0 and self._running is not None:  # nothing that is honest says so much
                if self._cell is not None:
                    self._cell.truncated = True
                self._running.stop()
                return
        if stream == SIDE:
            self._listen(data)
            return
        data = self._tail[stream] + data
        before, barrier, _ = data.partition(self._barrier) if self._barrier else (data, b"", b"")
        if barrier:
            self._passed.add(stream)
            self._tail[stream] = b""
            self._changed.set()
        else:  # the barrier may come in two pieces
            cut = data.rfind(b"\0", -len(self._barrier)) if self._barrier else -1
            before, self._tail[stream] = (data, b"") if cut < 0 else (data[:cut], data[cut:])
        cell = self._cell
        if cell is not None and cell.write(stream, before) and not self._interrupted and not self._done:
            cell.status, self._interrupted = ExecutionStatus.ERROR, True
            if self._running is not None:
                self._running.interrupt()

    def _listen(self, data: bytes) -> None:
        """Whole lines of its own channel are messages; what is none, a cell has written there."""
        ends = data.rfind(b"\n") + 1
        if not ends:
            self._line += data
            return
        lines, self._line = bytes(self._line) + data[:ends], bytearray(data[ends:])
        for line in lines.splitlines():
            message = _parsed(line)
            if isinstance(message, dict):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        cell = self._cell
        if message.get("ready"):
            self._ready = True
            self._changed.set()
        if cell is None or self._done or message.get("id") != self._number:
            return
        display = _texts(message.get("display"))
        if display is not None and len(cell.displays) < DISPLAYS:
            cell.displays.append(display)
        cell.truncated = cell.truncated or (display is not None and len(cell.displays) == DISPLAYS)
        if not message.get("done"):
            return
        self._done = True
        self._changed.set()
        cell.value, cell.trouble = _texts(message.get("result")), _texts(message.get("error"))
        if cell.trouble and cell.trouble.get("name") == "SystemExit" and cell.trouble.get("value") in ("", "0"):
            cell.trouble = None  # it wanted to end well
        if cell.status is ExecutionStatus.SUCCESS and cell.trouble is not None:
            cell.status = ExecutionStatus.CANCELLED if self._interrupted else ExecutionStatus.ERROR

    async def _end(self) -> None:
        running, self._running = self._running, None
        self._changed.set()
        if running is not None:
            running.stop()
            with suppress(SandboxLost):
                await asyncio.shield(running.over)


def _parsed(line: bytes) -> Any:
    """A message, if it is one. A large one has large texts in it, and not many of anything: a list of a million lists
    would take thirty times its own size."""
    try:
        if len(line) <= SMALL:
            return json.loads(line)
        builder = ijson.ObjectBuilder()
        for number, (event, value) in enumerate(ijson.basic_parse(line)):
            if number > PARTS:
                return None
            builder.event(event, value)
        return builder.value
    except (ValueError, RecursionError, ijson.JSONError):
        return None


def _texts(given: Any) -> dict[str, str] | None:
    """By name; whatever else a cell has put there is left out, and what no text can be made of is replaced."""
    if not isinstance(given, dict):
        return None
    return {_text(name): _text(words) for name, words in given.items() if isinstance(words, str)}


def _text(words: str) -> str:
    return words if words.isascii() else words.encode("utf-8", "replace").decode()


@register_tool("notebook_executor")
class NotebookExecutor(JobTool):
    """Execute a cell of Python in a notebook: variables stay for the next one; the last value and plots are shown."""

    class Parameters(ToolParameters):
        code: str = Field(default="", description="The cell")
        timeout: Seconds | None = Field(default=None, description="Seconds until the cell is interrupted")
        action: Literal["execute", "interrupt", "restart"] = Field(
            default="execute", description="Execute the cell; or interrupt the one that runs; or forget all variables"
        )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kernel = Kernel()

    async def execute(
        self, sandbox_context: Place, code: str = "", timeout: float | None = None, action: str = "execute"
    ) -> ToolResult:
        if action != "execute" and code.strip():
            return self.failure(f"Invalid input: code: {action} takes none")
        if action == "restart":
            await self._kernel.restart()
            return self.result("Restarted: all variables are gone")
        if action == "interrupt":
            hit = await self._kernel.interrupt()
            return self.result("Interrupted" if hit else "No cell is running")
        if not code.strip():
            return self.failure("No code provided")
        cell = await self._kernel.run(sandbox_context, code, self.seconds(sandbox_context, timeout))
        shown = [display.get("text/plain", "") for display in cell.displays]
        text = cell.stdout + "".join(f"\n{words}" for words in shown if words)
        if cell.value is not None:
            text += f"\nResult: {cell.value.get('text/plain', '')}"
        return self.result(text, status=cell.status, error=cell.complaint, metadata=cell.metadata)

    def program(self, spec: JobSpec, case: Case | None, compiled: bytes | None = None) -> Program:
        """A whole notebook, from a clean start: cells are divided by lines with `# %%`."""
        given = spec if case is None else case
        return Program(
            code=spec.code.encode(),
            main="main.py",
            argv=("python3", "-c", source(), "main.py"),
            args=given.args,
            stdin=given.stdin.encode(),
            env=ENV | spec.env,
            files=files_of(spec),
            limits=spec.limits,
        )
