"""A Python interpreter that stays: cells share their state, and show more than text."""

import asyncio
import json
import re
import secrets
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from schemas.errors import SandboxLost
from schemas.job import Case, JobSpec
from schemas.sandbox import ExecutionStatus, ToolResult
from worker.sandbox.base import SIDE, STDERR, STDOUT, Command, Program, Running, Sandbox
from worker.tools.base import JobTool, Place, ToolParameters, files_of
from worker.tools.registry import register_tool

START_SECONDS = 30.0
GRACE_SECONDS = 2.0
"""How long a cell that was interrupted may take to end, and the state it had is kept."""
BARRIER_SECONDS = 1.0
MESSAGE_BYTES = 24 << 20
"""Longest line of a kernel's own channel; it keeps to less."""
FOREVER = 30 * 86_400.0
ENV = {"MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}


@lru_cache(maxsize=1)
def source() -> str:
    """The program that runs inside: two modules of ours as one text."""
    mime, kernel = (Path(__file__).with_name(name).read_text() for name in ("mime.py", "kernel.py"))
    apart = re.compile(r"^from (__future__|worker\.tools\.mime) import .*\n", re.MULTILINE)
    return mime + apart.sub("", kernel)


class Cell:
    """What one cell did."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._texts = {STDOUT: bytearray(), STDERR: bytearray()}
        self.truncated = False
        self.displays: list[dict[str, str]] = []
        self.value: dict[str, str] | None = None
        self.trouble: dict[str, str] | None = None
        self.status = ExecutionStatus.SUCCESS
        self.note = ""
        self.state = "kept"
        """Whether what earlier cells defined is still there."""

    def write(self, stream: int, data: bytes) -> bool:
        """More output; whether it is too much by now."""
        room = self._cap - len(self._texts[stream])
        self._texts[stream] += data[:room]
        self.truncated = self.truncated or len(data) > room
        return self.truncated

    @property
    def stdout(self) -> str:
        """What it printed."""
        return self._texts[STDOUT].decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """What it wrote to standard error."""
        return self._texts[STDERR].decode("utf-8", "replace")

    @property
    def complaint(self) -> str | None:
        """Everything that is to be said of its failure; or what it wrote to standard error."""
        trace = str((self.trouble or {}).get("traceback", ""))
        return "\n".join(part for part in (self.stderr.rstrip("\n"), trace.rstrip("\n"), self.note) if part) or None

    @property
    def metadata(self) -> dict[str, Any]:
        """What is more than text."""
        return {"state": self.state, "displays": self.displays, "result": self.value, "truncated": self.truncated}


class Kernel:
    """One interpreter in a sandbox, started when it is needed. It runs one cell at a time; others wait their turn.

    What it says is the word of the code that runs in it: it is passed on, and nothing here depends on it.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._running: Running | None = None
        self._cell: Cell | None = None
        self._line = bytearray()
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._number = 0
        self._barrier = b""
        self._passed: set[int] = set()
        self._tail = {STDOUT: b"", STDERR: b""}
        self._changed = asyncio.Event()
        self._cap = 0
        self.interrupted = False
        self._abandoned = False

    async def run(self, place: Place, code: str, timeout: float) -> Cell:
        """One cell. Where it does not end in time it is interrupted; where that does not help, the state is lost."""
        async with self._lock:
            self._cap = place.config.resource_limits.output_bytes
            cell = Cell(self._cap)
            if self._abandoned:
                await self._calm(cell)
            if self._running is None or self._running.over.done():
                await self._start(place)
            try:
                await self._execute(cell, code, timeout)
            except asyncio.CancelledError:  # whoever waited is gone: the cell must not run on, but the state may stay
                self._abandoned = True
                if self._running is not None:
                    self._running.interrupt()
                raise
            return cell

    async def _calm(self, cell: Cell) -> None:
        """Before the next cell: the one that nobody waits for any more has ended, or takes the state along."""
        self._abandoned = False
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                while (message := await self._messages.get()) is not None:
                    if message.get("id") == self._number and message.get("done"):
                        return
        except TimeoutError:
            pass
        cell.state = "lost"
        await self._end()

    async def interrupt(self) -> bool:
        """As Control-C would; whether there was a cell to interrupt."""
        if self._running is None or self._cell is None:
            return False
        self.interrupted = True
        self._running.interrupt()
        return True

    async def restart(self) -> None:
        """Forget everything. A cell that runs is ended."""
        if self._cell is not None:
            self._cell.note = "The kernel was restarted while the cell ran."
        await self._end()

    async def _start(self, place: Place) -> None:
        box = await place.get_execution_context()
        if not isinstance(box, Sandbox):
            raise SandboxLost("a sandbox of this type cannot keep an interpreter")
        self._line.clear()
        self._messages = asyncio.Queue()
        command = Command(
            argv=("python3", "-c", source()), env=ENV | place.config.env_vars, side=True, wall_seconds=FOREVER,
            output_bytes=1 << 50,
        )  # fmt: skip
        self._running = running = box.spawn(command, self._hear)
        messages = self._messages
        running.over.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            async with asyncio.timeout(START_SECONDS):
                hello = await messages.get()
        except TimeoutError:
            hello = None
        if hello is None:
            await self._end()
            raise SandboxLost("the notebook's interpreter did not start")

    async def _execute(self, cell: Cell, code: str, timeout: float) -> None:
        assert self._running is not None
        self._number += 1
        token = secrets.token_hex(12)
        self._barrier, self._passed = b"\0" + token.encode() + b"\n", set()
        self._tail = {STDOUT: b"", STDERR: b""}
        self._cell, self.interrupted = cell, False
        request = {"id": self._number, "code": code, "barrier": token}
        self._running.feed(json.dumps(request).encode() + b"\n")
        loop = asyncio.get_running_loop()
        deadline, late = loop.time() + timeout, False
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        message = await self._messages.get()
                except TimeoutError:
                    if late:
                        await self._end()
                        message = None
                    else:  # the first time: let it end by itself, with its state
                        cell.status, late, deadline = ExecutionStatus.TIMEOUT, True, loop.time() + GRACE_SECONDS
                        self._running.interrupt()
                        continue
                if message is None:
                    self._lost(cell)
                    break
                if message.get("id") != self._number:
                    continue
                if self._take(cell, message):
                    break
            await self._settle()
        finally:
            self._cell = None
        if cell.status is ExecutionStatus.TIMEOUT:
            kept = "the variables of earlier cells are kept" if cell.state == "kept" else "all variables are lost"
            cell.note = f"Execution timed out after {timeout:g} seconds; {kept}."
        elif cell.truncated and cell.status is not ExecutionStatus.SUCCESS:
            cell.note = f"Its output was cut at {self._cap:,} bytes."

    def _take(self, cell: Cell, message: dict[str, Any]) -> bool:
        """One message of the cell; whether it was the last."""
        display = message.get("display")
        if isinstance(display, dict):
            cell.displays.append({str(mime): data for mime, data in display.items() if isinstance(data, str)})
        if not message.get("done"):
            return False
        value, trouble = message.get("result"), message.get("error")
        cell.value = value if isinstance(value, dict) else None
        cell.trouble = trouble if isinstance(trouble, dict) else None
        if cell.trouble and (cell.trouble.get("name"), cell.trouble.get("value")) in (
            ("SystemExit", "0"),
            ("SystemExit", ""),
        ):
            cell.trouble = None  # it wanted to end well
        if cell.status is ExecutionStatus.SUCCESS and cell.trouble is not None:
            cell.status = ExecutionStatus.CANCELLED if self.interrupted else ExecutionStatus.ERROR
        return True

    def _lost(self, cell: Cell) -> None:
        cell.state = "lost"
        if cell.status is ExecutionStatus.SUCCESS:
            cell.status = ExecutionStatus.ERROR
            cell.note = cell.note or "The interpreter died, and with it all variables."
            over = self._running.over if self._running else None
            if over is not None and over.done() and not over.exception() and over.result().oom_kills:
                cell.note = "The interpreter was killed for memory, and with it all variables are lost."

    async def _settle(self) -> None:
        """Until both streams have brought all that the cell wrote; one that it closed will not."""
        try:
            async with asyncio.timeout(BARRIER_SECONDS):
                while not self._passed >= {STDOUT, STDERR} and self._running and not self._running.over.done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    def _hear(self, stream: int, data: bytes) -> None:
        if stream == SIDE:
            self._line += data
            *lines, rest = self._line.split(b"\n")
            self._line = bytearray(rest if len(rest) <= MESSAGE_BYTES else b"")
            for line in lines:
                try:
                    message = json.loads(line)
                except ValueError:
                    continue  # a cell wrote to the channel itself
                if isinstance(message, dict):
                    self._messages.put_nowait(message)
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
        if self._cell is not None and self._cell.write(stream, before) and self._running and not self.interrupted:
            self._cell.status = ExecutionStatus.ERROR
            self.interrupted = True
            self._running.interrupt()

    async def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.stop()
            with suppress(SandboxLost):
                await asyncio.shield(running.over)


@register_tool("notebook_executor")
class NotebookExecutor(JobTool):
    """Execute a cell of Python in a notebook: variables stay for the next one; the last value and plots are shown."""

    class Parameters(ToolParameters):
        code: str = Field(default="", description="The cell")
        timeout: float | None = Field(default=None, gt=0, description="Seconds until the cell is interrupted")
        action: Literal["execute", "interrupt", "restart"] = Field(
            default="execute", description="Execute the cell; or interrupt the one that runs; or forget all variables"
        )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kernel = Kernel()

    async def execute(
        self, sandbox_context: Place, code: str = "", timeout: float | None = None, action: str = "execute"
    ) -> ToolResult:
        if action == "interrupt":
            hit = await self._kernel.interrupt()
            return self.result("Interrupted" if hit else "No cell is running")
        if action == "restart":
            await self._kernel.restart()
            return self.result("Restarted: all variables are gone")
        if not code.strip():
            return self.failure("No code provided")
        timeout = timeout or self.options.timeout or sandbox_context.config.timeout
        cell = await self._kernel.run(sandbox_context, code, timeout)
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
