"""A command that is a process of this machine: fed, read, stopped, and counted as far as that goes."""

import asyncio
import os
import resource
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.errors import SandboxLost
from worker.sandbox.agent.filter import assemble
from worker.sandbox.agent.kernel import descendants
from worker.sandbox.base import SIDE, STDERR, STDOUT, Command, Hear, Outcome, Running, Usage

if TYPE_CHECKING:
    from worker.sandbox.local import LocalSandbox

GULP = 1 << 15
SIGNALS = 64
"""A status of 128 and up to so many more is a signal, as bubblewrap tells it."""
SHIFT = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.execvp(sys.argv[2], sys.argv[2:])"
"""Gives a command its third descriptor under the number that it expects."""
DRAIN_SECONDS = 1.0
SOONEST, SHARE = 0.02, 0.1
"""When a command is first looked at, in seconds; and of its time so far, when next."""


class Local(Running):
    """A process of this machine."""

    def __init__(self, sandbox: "LocalSandbox", command: Command, hear: Hear, scripts: list[Path]) -> None:
        super().__init__()
        self._sandbox, self._command, self._hear, self._scripts = sandbox, command, hear, scripts
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._total = {STDOUT: 0, STDERR: 0, SIDE: 0}
        self._ended = "itself"
        self._stopped = asyncio.Event()
        self.pid = 0

    def begin(self, argv: tuple[str, ...], cwd: str, env: dict[str, str], limit: partial[None]) -> None:
        """On its way."""
        self._task = asyncio.create_task(self._go(argv, cwd, env, limit))

    def feed(self, data: bytes, *, last: bool = False) -> None:
        for part in (data, b"") if last else (data,):
            if part or last:
                self._input.put_nowait(part)

    def interrupt(self) -> None:
        for pid in self.processes() - {self.pid} if self._sandbox.walls else {self.pid} - {0}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def stop(self) -> None:
        self._end("stopped")

    def processes(self) -> set[int]:
        """All that it has started; none before it has begun."""
        return {self.pid, *descendants(self.pid)} if self.pid else set()

    def _end(self, how: str) -> None:
        if self._ended == "itself":
            self._ended = how
        self._stopped.set()

    async def _go(self, argv: tuple[str, ...], cwd: str, env: dict[str, str], limit: partial[None]) -> None:
        try:
            outcome = await self._process(argv, cwd, env, limit)
        except Exception as error:
            self.over.set_exception(SandboxLost(f"the command could not be run: {error}"))
        else:
            if self._sandbox.alive:
                self.over.set_result(outcome)
            else:
                self.over.set_exception(SandboxLost("the sandbox was closed"))
        finally:
            for script in self._scripts:
                script.unlink(missing_ok=True)

    async def _process(self, argv: tuple[str, ...], cwd: str, env: dict[str, str], limit: partial[None]) -> Outcome:
        sandbox, side, passed = self._sandbox, -1, []
        if self._command.side:
            side, other = os.pipe()
            passed.append(other)
            argv = (sandbox.python, "-c", SHIFT, str(other), *argv)
        if sandbox.walls:
            passed.append(os.memfd_create("filter", 0))
            os.write(passed[-1], assemble())
            os.lseek(passed[-1], 0, os.SEEK_SET)
            argv = sandbox.wall(argv, cwd, passed[-1])
        started = time.monotonic()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, cwd="/" if sandbox.walls else cwd, env=env, start_new_session=True, preexec_fn=limit,
                pass_fds=passed, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            if side >= 0:
                os.close(side)
            if not isinstance(error, OSError):
                raise
            # there is no such program: as a shell would say it
            self._hear(STDERR, f"{error.filename or argv[0]}: {error.strerror}\n".encode())
            return self._outcome(127, started, Usage(0, 0, 0))
        finally:
            for fd in passed:
                os.close(fd)
        self.pid = process.pid
        assert process.stdout
        assert process.stderr
        pumps = [self._pump(process.stdout, STDOUT), self._pump(process.stderr, STDERR)]
        if side >= 0:
            reader = asyncio.StreamReader()
            pipe = os.fdopen(side, "rb", 0)
            channel, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), pipe
            )
            self.over.add_done_callback(lambda _: channel.close())
            pumps.append(self._pump(reader, SIDE))
        tasks = [asyncio.create_task(pump) for pump in (self._feed(process), *pumps)]
        stopped, over = asyncio.create_task(self._stopped.wait()), asyncio.create_task(process.wait())
        deadline, used = started + self._command.wall_seconds, Usage(0, 0, 0)
        while not (stopped.done() or over.done() or process.returncode is not None):
            left = deadline - time.monotonic()
            if left <= 0:
                self._end("wall")
                break
            look = max(SOONEST, SHARE * (time.monotonic() - started))
            await asyncio.wait((stopped, over), timeout=min(left, look), return_when=asyncio.FIRST_COMPLETED)
            now = usage(set() if over.done() else self.processes())
            used = Usage(max(used.cpu_seconds, now.cpu_seconds), max(used.memory_bytes, now.memory_bytes), 1)
        with suppress(ProcessLookupError, PermissionError):  # behind walls, all the rest ends with the first
            os.killpg(process.pid, signal.SIGKILL)
        stopped.cancel()
        # What was written is read to the end; but one that left our group may hold the pipes for ever.
        await asyncio.wait((over, *tasks[1:]), timeout=DRAIN_SECONDS)
        over.cancel()
        status = -signal.SIGKILL if process.returncode is None else process.returncode
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        process._transport.close()  # type: ignore[attr-defined]  # else such pipes stay open
        if sandbox.walls and 128 < status <= 128 + SIGNALS:
            status = 128 - status
        return self._outcome(status, started, used)

    def _outcome(self, status: int, started: float, used: Usage) -> Outcome:
        """The kernel counts for all our children together: what was seen of this one must do."""
        return Outcome(
            ended=self._ended,
            exit_code=status if status >= 0 else None,
            signal=-status if status < 0 else None,
            checked=False,
            said="",
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
                self._end("output")


def usage(pids: set[int]) -> Usage:
    """Of these processes, as far as they still are there."""
    ticks = memory = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, words[11:15]))  # its own, and that of children which have ended
            memory += int(words[21]) * resource.getpagesize()
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), memory, len(pids))
