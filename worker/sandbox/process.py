"""A command that is a process of this machine: started behind walls or without, fed, read, stopped, and counted."""

import asyncio
import os
import resource
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from evalpool.schemas.errors import SandboxLost
from evalpool.schemas.limits import Limits
from evalpool.worker.sandbox.agent.filter import assemble
from evalpool.worker.sandbox.agent.kernel import descendants
from evalpool.worker.sandbox.base import (
    SIDE,
    STDERR,
    STDOUT,
    Command,
    End,
    Hear,
    Note,
    Outcome,
    Running,
    Shape,
    Usage,
    signal_of,
)
from evalpool.worker.sandbox.walls import behind, limit

GULP = 1 << 15
"""Bytes that are read of a stream at a time."""
DRAIN_SECONDS = 1.0
"""How long the output of a command that has ended is still read."""
SOONEST_SECONDS, SHARE = 0.02, 0.1
"""When a command's use is first looked at; and after which share of its time so far it is looked at again."""
SHIFT = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.execvp(sys.argv[2], sys.argv[2:])"
"""Gives a command its third descriptor under the number that the command expects."""


class Folders(NamedTuple):
    """The two folders of a sandbox, in a parent folder of its own."""

    work: Path
    """Where commands work; the folder does not exist yet."""
    scripts: Path
    """Beside it, so that commands do not find each other's text in there."""


class Launch(NamedTuple):
    """Everything that the first process of a command is started with."""

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    folders: Folders
    limits: Limits | None
    """The limits of a program; a command of a session has none of its own."""
    scripts: list[Path]
    """Files that are removed when the command has ended."""
    python: str
    """The command that starts the interpreter inside."""
    walls: Shape | None
    """What the walls enclose; None if there are no walls."""
    uid: int | None
    """The user that the command runs as; None for the worker's own."""


class Process(Running):
    """One command, from its first process to the last byte of its output."""

    def __init__(self, launch: Launch, command: Command, hear: Hear, is_open: Callable[[], bool]) -> None:
        super().__init__()
        self._launch, self._command, self._hear, self._is_open = launch, command, hear, is_open
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._total = {STDOUT: 0, STDERR: 0, SIDE: 0}
        self._ended = End.ITSELF
        self._stopped = asyncio.Event()
        self.pid = 0
        """0 until the process has started."""
        self._task = asyncio.create_task(self._go())

    def feed(self, data: bytes, *, last: bool = False) -> None:
        for part in (data, b"") if last else (data,):
            if part or last:
                self._input.put_nowait(part)

    def interrupt(self) -> None:
        for pid in self.processes() - {self.pid} if self._launch.walls else {self.pid} - {0}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def stop(self) -> None:
        self._end(End.STOPPED)

    def processes(self) -> set[int]:
        """Return the ids of the command's processes; there are none before it has started."""
        return {self.pid, *descendants(self.pid)} if self.pid else set()

    def _end(self, how: End) -> None:
        if self._ended is End.ITSELF:
            self._ended = how
        self._stopped.set()

    async def _go(self) -> None:
        try:
            outcome = await self._run()
        except Exception as error:
            self.over.set_exception(SandboxLost(f"the command could not be run: {error}"))
        else:
            if self._is_open():
                self.over.set_result(outcome)
            else:
                self.over.set_exception(SandboxLost("the sandbox was closed"))
        finally:
            for script in self._launch.scripts:
                script.unlink(missing_ok=True)

    async def _run(self) -> Outcome:
        """Start the command, wait for its end or for a limit, kill its processes and read the rest of its output."""
        launch, argv, side, passed = self._launch, self._launch.argv, -1, []
        if self._command.side:
            side, other = os.pipe()
            passed.append(other)
            argv = (launch.python, "-c", SHIFT, str(other), *argv)
        if launch.walls:
            passed.append(os.memfd_create("filter", 0))
            os.write(passed[-1], assemble())
            os.lseek(passed[-1], 0, os.SEEK_SET)
            argv = behind(
                argv, launch.cwd, shape=launch.walls, folder=launch.folders.work, scripts=launch.folders.scripts,
                uid=launch.uid, filter_fd=passed[-1],
            )  # fmt: skip
        started = time.monotonic()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, cwd="/" if launch.walls else launch.cwd, env=launch.env, start_new_session=True, pass_fds=passed,
                preexec_fn=partial(limit, launch.limits, launch.walls, launch.uid),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            if side >= 0:
                os.close(side)
            if not isinstance(error, OSError):
                raise
            # The program does not exist: this says so as a shell does.
            self._hear(STDERR, f"{error.filename or argv[0]}: {error.strerror}\n".encode())
            return self._outcome(127, started, Usage(0, 0, 0))
        finally:
            for fd in passed:
                os.close(fd)
        self.pid = process.pid
        pumps = [asyncio.create_task(pump) for pump in await self._pumps(process, side)]
        used, status = await self._watch(process, started), await self._settle(process, pumps)
        if launch.walls and (killer := signal_of(status)):  # bubblewrap ended by itself and says so like a shell
            status = -killer
        return self._outcome(status, started, used)

    async def _pumps(self, process: asyncio.subprocess.Process, side: int) -> list[Coroutine[None, None, None]]:
        """Return what moves the command's input, which comes first, and its output."""
        assert process.stdout
        assert process.stderr
        pumps = [self._feed(process), self._pump(process.stdout, STDOUT), self._pump(process.stderr, STDERR)]
        if side >= 0:
            reader = asyncio.StreamReader()
            channel, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(side, "rb", 0)
            )
            self.over.add_done_callback(lambda _: channel.close())
            pumps.append(self._pump(reader, SIDE))
        return pumps

    async def _watch(self, process: asyncio.subprocess.Process, started: float) -> Usage:
        """Wait until the command ends or is to end; return the most that it was seen to use."""
        stopped, over = asyncio.create_task(self._stopped.wait()), asyncio.create_task(process.wait())
        deadline, used = started + self._command.wall_seconds, Usage(0, 0, 0)
        while not (stopped.done() or over.done() or process.returncode is not None):
            left = deadline - time.monotonic()
            if left <= 0:
                self._end(End.WALL)
                break
            look = max(SOONEST_SECONDS, SHARE * (time.monotonic() - started))
            await asyncio.wait((stopped, over), timeout=min(left, look), return_when=asyncio.FIRST_COMPLETED)
            now = usage(set() if over.done() else self.processes())
            used = Usage(max(used.cpu_seconds, now.cpu_seconds), max(used.memory_bytes, now.memory_bytes), 1)
        stopped.cancel()
        over.cancel()
        return used

    async def _settle(self, process: asyncio.subprocess.Process, pumps: list[asyncio.Task[None]]) -> int:
        """Kill what is left of the command, read its output to the end and return its status."""
        with suppress(ProcessLookupError, PermissionError):  # behind walls, all the rest ends with the first process
            os.killpg(process.pid, signal.SIGKILL)
        over = asyncio.create_task(process.wait())
        # A process that left our group may hold the pipes open for ever, so reading has an end.
        await asyncio.wait((over, *pumps[1:]), timeout=DRAIN_SECONDS)
        over.cancel()
        status = -signal.SIGKILL if process.returncode is None else process.returncode
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        process._transport.close()  # type: ignore[attr-defined]  # else such pipes stay open
        return status

    def _outcome(self, status: int, started: float, used: Usage) -> Outcome:
        """Return the outcome, with the use that was seen: the kernel counts only for all our children together."""
        return Outcome(
            ended=self._ended,
            exit_code=status if status >= 0 else None,
            signal=-status if status < 0 else None,
            checked=False,
            note=Note.NONE,
            stdout=b"",
            stderr=b"",
            stdout_total=self._total[STDOUT],
            stderr_total=self._total[STDERR],
            wall_seconds=time.monotonic() - started,
            cpu_seconds=used.cpu_seconds,
            memory_bytes=used.memory_bytes,
            oom_kills=0,
            processes=1,
        )

    async def _feed(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin
        with suppress(ConnectionError):
            while data := await self._input.get():
                process.stdin.write(data)
                await process.stdin.drain()
        process.stdin.close()

    async def _pump(self, reader: asyncio.StreamReader, stream: int) -> None:
        while data := await reader.read(GULP):
            room = self._command.output_bytes + 1 - self._total[stream]
            self._total[stream] += len(data)
            if room > 0:
                self._hear(stream, data[:room])
            if len(data) >= room:
                self._end(End.OUTPUT)


def usage(pids: set[int]) -> Usage:
    """Return what these processes use, as far as they still exist."""
    ticks = memory = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, words[11:15]))  # its own, and that of its children that have ended
            memory += int(words[21]) * resource.getpagesize()
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), memory, len(pids))
