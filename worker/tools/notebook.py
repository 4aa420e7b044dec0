"""The notebook tool: a Python interpreter that goes on running, so that cells share their state and can show images."""

import asyncio
import json
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from evalpool.schemas.errors import SandboxLost
from evalpool.schemas.job import Case, JobSpec
from evalpool.schemas.sandbox import LONGEST_SECONDS, ExecutionStatus, ToolResult
from evalpool.worker.sandbox.base import SIDE, STDERR, STDOUT, Command, End, Program, Running
from evalpool.worker.tools.base import JobTool, Place, Seconds, ToolParameters, files_of
from evalpool.worker.tools.files import ISOLATED
from evalpool.worker.tools.registry import register_tool

START_SECONDS = 30.0
GRACE_SECONDS = 2.0
"""How long a cell may take to end after an interrupt. If it takes longer, the state is lost."""
BARRIER_SECONDS = 1.0
CELL_BYTES, IDLE_BYTES = 64 << 20, 4 << 20
"""How many bytes one cell may send in addition to its output, and how many its threads may send before the next
cell."""
DISPLAYS = 1000
"""How many things one cell can show."""
LINE, NOISE = 256, 16 << 10
"""How many bytes a message counts for in addition to its own, and a line that is not a message, which only malicious
code sends."""
LARGE, SMALL, PARTS = 16 << 20, 1 << 16, 4096
"""The most bytes of a message, of what is in it beside its strings, and the most strings in it."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string, even without an end. It matches wherever it is tried, so that a message is read in one pass."""
ENDED = "The interpreter has ended since the last cell, so all variables of earlier cells are lost."
ENV = {"MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}


@lru_cache(maxsize=1)
def source() -> str:
    """Return the program that runs inside the sandbox."""
    kernel = Path(__file__).with_name("notebook_kernel.py").read_text()
    first = "from __future__ import annotations\n"
    return first + ISOLATED + kernel.replace(first, "", 1)


class Cell:
    """What one cell has printed and shown, and how it ended."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._texts = {STDOUT: bytearray(), STDERR: bytearray()}
        self.truncated = False
        self.displays: list[dict[str, str]] = []
        self.value: dict[str, str] | None = None
        self.trouble: dict[str, str] | None = None
        self.status = ExecutionStatus.SUCCESS
        self.note = ""
        self.state = "kept"
        """`kept` if the variables of earlier cells are still there, or else `lost`."""

    def write(self, stream: int, data: bytes) -> bool:
        """Add output. Returns whether it is above the limit."""
        room = self.cap - len(self._texts[stream])
        self._texts[stream] += data[:room]
        self.truncated = self.truncated or len(data) > room
        return self.truncated

    @property
    def stdout(self) -> str:
        """What the cell printed."""
        return self._texts[STDOUT].decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """What the cell wrote to standard error."""
        return self._texts[STDERR].decode("utf-8", "replace")

    @property
    def complaint(self) -> str | None:
        """The error output of the cell, its traceback and our note; `None` if there is nothing of that."""
        trace = str((self.trouble or {}).get("traceback", ""))
        return "\n".join(part for part in (self.stderr.rstrip("\n"), trace.rstrip("\n"), self.note) if part) or None

    @property
    def metadata(self) -> dict[str, Any]:
        """What the cell showed, and whether its state is kept."""
        return {"state": self.state, "displays": self.displays, "result": self.value, "truncated": self.truncated}


class Kernel:
    """One interpreter in a sandbox, started when it is needed. It runs one cell at a time.

    Its messages may come from the code that runs in it. They are passed on, and nothing here relies on them.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._running: Running | None = None
        self._cell: Cell | None = None
        """The cell that runs, even if nobody waits for it any more."""
        self._number = 0
        self._line = bytearray()
        self._room = 0
        """How many bytes may still come in addition to a cell's output, or in all while no cell runs."""
        self._barrier = b""
        self._passed: set[int] = set()
        self._tail = {STDOUT: b"", STDERR: b""}
        self._changed = asyncio.Event()
        self._ready = self._done = self._interrupted = self._abandoned = False

    async def run(self, place: Place, code: str, timeout: float) -> Cell:
        """Run one cell. A cell that does not end in time is interrupted; if that does not help, the state is lost."""
        async with self._lock:
            cell = Cell(place.config.resource_limits.output_bytes)
            if self._abandoned and not await self._within(GRACE_SECONDS, lambda: self._done):
                await self._end()
                cell.state, cell.note = "lost", ENDED
            self._abandoned, self._cell = False, None
            if self._dead():
                if self._running is not None:  # the interpreter has ended by itself since the last cell
                    cell.state, cell.note = "lost", ENDED
                await self._start(place)
            try:
                await self._execute(cell, code, timeout)
            except asyncio.CancelledError:  # nobody waits for the cell, so it must not run on, but the state may stay
                self._abandoned = True
                if self._running is not None:
                    self._running.interrupt()
                raise
            self._cell, self._room = None, IDLE_BYTES
            return cell

    async def interrupt(self) -> bool:
        """Interrupt the running cell as Control-C would. Returns whether there was one."""
        if self._running is None or self._cell is None or self._done:
            return False
        self._interrupted = True
        self._running.interrupt()
        return True

    async def restart(self) -> None:
        """End the interpreter, with all variables and a cell that runs."""
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
        """Wait until the condition holds, the interpreter has ended or the time is over. Returns whether it holds."""
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
            cell.status = ExecutionStatus.TIMEOUT  # the interrupt lets it end by itself, with its state
            self._running.interrupt()
            if not await self._within(GRACE_SECONDS, lambda: self._done):
                await self._end()
        if self._done:
            await self._within(BARRIER_SECONDS, lambda: self._passed >= {STDOUT, STDERR})  # unless the cell closed them
        else:
            self._lost(cell)
        if cell.status is ExecutionStatus.TIMEOUT:
            kept = "the variables of earlier cells are kept" if cell.state == "kept" else "all variables are lost"
            cell.note = f"Execution timed out after {timeout:g} seconds; {kept}."
        elif cell.truncated and cell.status is not ExecutionStatus.SUCCESS:
            cell.trouble = None  # our own interrupt
            cell.note = (
                f"The cell was stopped: it wrote more than {cell.cap:,} bytes to one stream, or showed too much."
            )

    def _dead(self) -> bool:
        return self._running is None or self._running.over.done()

    def _lost(self, cell: Cell) -> None:
        cell.state = "lost"
        if cell.status is ExecutionStatus.SUCCESS:
            cell.status = ExecutionStatus.ERROR
        if cell.status is ExecutionStatus.ERROR and cell.note in ("", ENDED):
            cell.note = "The interpreter died, and all variables are lost."
            over = self._running.over if self._running else None
            if over is not None and over.done() and (over.exception() or over.result().ended is End.STOPPED):
                cell.status = ExecutionStatus.CANCELLED
                cell.note = "The sandbox has ended or was reset, and all variables are lost."
            elif over is not None and over.done() and over.result().oom_kills:
                cell.note = "The interpreter was killed because it ran out of memory, and all variables are lost."

    def _hear(self, stream: int, data: bytes) -> None:
        if (stream == SIDE or self._cell is None) and not self._afford(len(data)):
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

    def _afford(self, cost: int) -> bool:
        """Take this many bytes from the room that is left. If there is not enough, stop the interpreter and return
        False."""
        self._room -= cost
        if self._room >= 0 or self._running is None:
            return True
        if self._cell is not None:
            self._cell.truncated = True
        self._running.stop()
        return False

    def _listen(self, data: bytes) -> None:
        """Read messages, one per line, from the kernel's own channel, where cells can write as well."""
        ends = data.rfind(b"\n") + 1
        if not ends:
            self._line += data
            return
        lines, self._line = bytes(self._line) + data[:ends], bytearray(data[ends:])
        for line in filter(None, lines.split(b"\n")):
            message = _parsed(line)
            if isinstance(message, dict):
                self._take(message)
            if not self._afford(LINE if isinstance(message, dict) else NOISE):
                return

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
            cell.trouble = None  # the cell wanted to end without an error
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
    """Return a message, or `None` if the line is not one. A large message must consist of a few large strings, since a
    list of a million lists would take thirty times its own size."""
    try:
        return json.loads(line) if len(line) <= SMALL or _modest(line) else None
    except (ValueError, RecursionError):
        return None


def _modest(line: bytes) -> bool:
    if len(line) > LARGE:
        return False
    texts = [found.span() for found in islice(_TEXT.finditer(line), PARTS + 1)]
    return len(texts) <= PARTS and len(line) - sum(end - start for start, end in texts) <= SMALL


def _texts(given: Any) -> dict[str, str] | None:
    """Return the strings of a message by name. Everything else is left out, and characters that are not valid are
    replaced."""
    if not isinstance(given, dict):
        return None
    return {_text(name): _text(words) for name, words in given.items() if isinstance(words, str)}


def _text(words: str) -> str:
    return words if words.isascii() else words.encode("utf-8", "replace").decode()


@register_tool("notebook_executor")
class NotebookExecutor(JobTool):
    """Runs the cells of a notebook."""

    description = (
        "Execute a Python cell in a notebook. Variables are kept for the next cell; the last value and plots are shown."
    )

    class Parameters(ToolParameters):
        code: str = Field(default="", description="The cell")
        timeout: Seconds | None = Field(default=None, description="Seconds until the cell is interrupted")
        action: Literal["execute", "interrupt", "restart"] = Field(
            default="execute", description="Execute the cell, interrupt the running cell, or restart without variables"
        )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kernel = Kernel()

    async def execute(
        self, sandbox_context: Place, code: str = "", timeout: float | None = None, action: str = "execute"
    ) -> ToolResult:
        if action != "execute" and code.strip():
            return self.failure(f"Invalid input: code must be empty for {action}")
        if action == "restart":
            await self._kernel.restart()
            return self.result("Restarted: all variables are lost")
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
        """Return a program that runs a whole notebook from a clean start. Lines with `# %%` divide its cells."""
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
