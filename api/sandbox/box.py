"""A sandbox for callers around a box, which is a sandbox of the worker. The types that come with evalpool differ only
in how they make their box."""

import asyncio
import inspect
import re
import time
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace

from evalpool.api.sandbox import transfer
from evalpool.api.sandbox.output import Output
from evalpool.api.sandbox.sandbox import Listener, Sandbox
from evalpool.schemas.errors import InvalidCall, SandboxLost
from evalpool.schemas.sandbox import (
    LONGEST_SECONDS,
    CommandResult,
    ExecutionStatus,
    SandboxConfig,
    SandboxInfo,
    SandboxStatus,
)
from evalpool.worker.sandbox.base import Box, Command, End, Hear, Outcome, Running, Shape

AT_ONCE = 16
"""Commands that one sandbox runs at a time; further commands wait."""
STOP_SECONDS = 2.0
"""Seconds that a stop waits for running commands to end."""
STOPPED = 137
"""The exit code of a command that was stopped before it began, as if it had been killed."""
SHELL = re.compile(r"/[a-z/]*/(ba)?sh")
KERNELS = 2
"""Interpreters that may stay alive between calls, in addition to the running commands."""
KEEPERS_MIB = 32
"""Memory in MiB for evalpool's own processes in the sandbox, which watch the commands."""


class BoxSandbox(Sandbox):
    """A sandbox whose commands run in a box."""

    keeps_tmp = False
    """Whether all commands share one `/tmp`, so that files there can be read and written."""

    def __init__(self, config: SandboxConfig, sandbox_id: str | None = None) -> None:
        super().__init__(config, sandbox_id)
        self.box: Box | None = None
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._life, self._gate = asyncio.Lock(), asyncio.Lock()
        """`_life` lets only one start or stop happen at a time; `_gate` keeps commands from beginning during a
        reset."""
        self._running: set[Running] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shell_path = ""

    @abstractmethod
    async def _make(self) -> Box:
        """Return a new box, started."""

    @property
    def shape(self) -> Shape:
        """The limits with which the box is made. Files are kept in memory, and leave a part of it to the commands: a
        sandbox that is full of files must go on working."""
        limits, memory = self.config.resource_limits, self.config.memory_mib
        return Shape(
            "", memory, limits.processes, min(limits.disk_mib, max(1, memory * 3 // 4)), cpus=self.config.cpu_limit,
            extra_mib=KEEPERS_MIB, commands=AT_ONCE + KERNELS, home=self.config.working_dir,
        )  # fmt: skip

    async def start(self) -> None:
        async with self._life:
            await self._start()

    async def _start(self) -> None:
        if self.status.active:
            return
        self._loop = asyncio.get_running_loop()
        if self.status is not SandboxStatus.INITIALIZING:
            self.update_status(SandboxStatus.INITIALIZING)
        try:
            await self._new_tools()  # before the box: wrong options of a tool must not cost a container
            self.box = await self._make()
            self.metadata |= {"container_id": self.box.id, "image_digest": self.box.image_digest}
            self.metadata.pop("error", None)
            self.update_status(SandboxStatus.RUNNING)
            await self._prepare()
        except BaseException as error:
            await self.cleanup()
            self.fail(error)
            raise

    async def _prepare(self) -> None:
        """Prepare the running sandbox for its user."""

    async def stop(self) -> None:
        if self._loop not in (None, asyncio.get_running_loop()):
            await self.cleanup()  # the loop that started it is gone, and its waiting coroutines with it
            self._life = asyncio.Lock()
        async with self._life:
            await self._stop()

    async def _stop(self) -> None:
        if self.status is SandboxStatus.STOPPED:
            return
        broken = self.status is SandboxStatus.ERROR
        try:
            if not broken:
                self.update_status(SandboxStatus.STOPPING)
                with suppress(TimeoutError):  # callers that wait for a command get its output so far
                    await asyncio.wait_for(self.end_commands(), STOP_SECONDS)
            await self.cleanup()
        except BaseException as error:
            self.fail(error)
            raise
        if not broken:
            self.update_status(SandboxStatus.STOPPED)

    async def cleanup(self) -> None:
        box, self.box = self.box, None
        if box is not None:
            await box.close()

    async def reset(self) -> bool:
        """Remove all files, processes and tool states, as if the sandbox were new. Returns `False` if that could not be
        verified."""
        async with self._gate:
            if self.box is None or not await self.box.reset():
                return False
        await self.renew()
        return True

    async def renew(self) -> None:
        """Prepare the sandbox for its next user: new tools, which know nothing of earlier calls, and its volumes."""
        await self._new_tools()
        await self._prepare()

    async def _new_tools(self) -> None:
        self._shell_path = ""
        for name in self.config.tools_config:
            self._tools.pop(name, None)
        await self.initialize_tools()

    async def get_execution_context(self) -> Box:
        return self._living()

    async def execute_command(
        self,
        command: str | list[str],
        timeout: float | None = None,
        stream: bool | Listener = True,
        *,
        stdin: str | bytes = b"",
    ) -> CommandResult:
        if (
            not isinstance(command, str | list | tuple)
            or not command
            or not all(isinstance(part, str) for part in command)
        ):
            raise InvalidCall("command: it must be a command line, or a list of a program and its arguments")
        active = self.status.active
        argv = (await self._shell(), "-c", command) if isinstance(command, str) else tuple(command)
        if active and self._ending:  # stopped while the shell was looked up
            return _not_begun(command)
        done = await self.execute(Command(argv=argv, wall_seconds=self._seconds(timeout)), stdin, stream)
        return done.model_copy(update={"command": command})

    async def _shell(self) -> str:
        """Return the shell that runs command lines: bash, or sh where there is no bash."""
        if not self._shell_path:
            look = Command(argv=("sh", "-c", "command -v bash sh"), wall_seconds=self.config.timeout)
            found = (await self.execute(look)).stdout.partition("\n")[0]
            self._shell_path = found if SHELL.fullmatch(found) else ""
        return self._shell_path or "sh"

    async def execute_python(
        self,
        code: str,
        timeout: float | None = None,
        *,
        args: tuple[str, ...] = (),
        stdin: str | bytes = b"",
        encoding: str = "utf-8",
    ) -> CommandResult:
        if not isinstance(code, str):
            raise InvalidCall(f"code: it must be text, not {type(code).__name__}")
        command = Command(code=code.encode(), args=args, wall_seconds=self._seconds(timeout))
        return await self.execute(command, stdin, encoding=encoding)

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self.config.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= LONGEST_SECONDS:
            raise InvalidCall(f"timeout: {timeout!r} is not a number of seconds between 0 and {LONGEST_SECONDS:,}")
        return timeout

    async def execute(
        self,
        command: Command,
        stdin: str | bytes = b"",
        stream: bool | Listener = False,
        *,
        encoding: str = "utf-8",
        output_bytes: int | None = None,
    ) -> CommandResult:
        given = _bytes("stdin", stdin)
        _check_words((*command.argv, *command.args))
        if inspect.iscoroutinefunction(stream):
            raise TypeError("stream: it must be a plain function, which is called for each line")
        if asyncio.get_running_loop() is not self._loop and self.status.active:
            raise RuntimeError(f"sandbox {self.id} was started in another event loop and works only there")
        most = self.config.resource_limits.output_bytes if output_bytes is None else output_bytes
        command = replace(command, env=self.config.env_vars | command.env, output_bytes=most)
        output = Output(self.id, stream)
        running = await self._begin(command, output)
        if running is None:
            return _not_begun(list(command.argv))
        output.stop = running.stop
        return output.result(command, await self._outcome(running, given), encoding)

    async def _begin(self, command: Command, output: Output) -> Running | None:
        """Start a command when its turn comes; `None` if the sandbox was stopped meanwhile."""
        turns = self._turns
        await turns.acquire()
        try:
            if turns is not self._turns:
                turns.release()  # the next command in the queue finds the same
                return None
            running = await self.spawn(command, output.hear)
        except BaseException:
            turns.release()
            raise
        running.over.add_done_callback(lambda _: turns.release())  # the command may outlive its caller
        return running

    async def _outcome(self, running: Running, given: bytes) -> Outcome:
        """Pass standard input to a command and wait for its end."""
        started = time.monotonic()
        try:
            running.feed(given, last=True)
            return await asyncio.shield(running.over)
        except SandboxLost as error:
            if self.status.active:  # otherwise the failure is known already, or the sandbox is being stopped
                self.fail(error)
            if not self._ending:
                raise
            # The command was told to stop, and its sandbox did not wait for its end: the sandbox has not failed.
            return replace(Outcome.killed_for_memory(time.monotonic() - started), ended=End.STOPPED, oom_kills=0)
        except asyncio.CancelledError:
            running.stop()  # nobody waits for it any more
            raise

    async def spawn(self, command: Command, hear: Hear) -> Running:
        async with self._gate:
            box = self._living()
            running = box.spawn(command, hear)
        self._running.add(running)

        def ended(over: asyncio.Future[Outcome]) -> None:
            self._running.discard(running)
            if not over.cancelled() and not over.exception() and over.result().abnormal:
                box.suspect = True

        running.over.add_done_callback(ended)
        return running

    async def end_commands(self) -> None:
        """Stop the commands that run or wait for their turn, and wait until the running ones have ended."""
        self._turns = asyncio.Semaphore(AT_ONCE)
        for running in self._running:
            running.stop()
        if self._running:
            await asyncio.wait([running.over for running in self._running])

    async def put_archive(self, target_dir: str, data: bytes) -> bool:
        if not data:
            raise InvalidCall("data: Archive body must not be empty")
        await self._transfer(transfer.UNPACK, "target_dir", target_dir, _bytes("data", data))
        return True

    async def put_file(self, file_path: str, content: str | bytes, encoding: str = "utf-8") -> bool:
        data = _bytes("content", content, encoding)
        await self._transfer(transfer.WRITE, "file_path", file_path, data)
        return True

    async def get_archive(self, source_dir: str) -> bytes:
        return await self._transfer(transfer.PACK, "source_dir", source_dir)

    async def get_file(self, file_path: str) -> bytes:
        return await self._transfer(transfer.READ, "file_path", file_path)

    async def _transfer(self, script: str, field: str, path: str, data: bytes = b"") -> bytes:
        """Run one of our scripts inside, with a path and data, and return what it writes. Raises `InvalidCall` naming
        the field if the path is outside the writable folders, and `OSError` if the script fails."""
        path = transfer.inside(field, path, self.config.working_dir, tmp=self.keeps_tmp)
        most = 2 * self.config.resource_limits.disk_mib << 20  # all files that fit, and what an archive adds
        command = transfer.command(script, path, self.config.timeout)
        return transfer.output(path, await self.execute(command, data, encoding="latin-1", output_bytes=most))

    def get_info(self) -> SandboxInfo:
        with suppress(SandboxLost):
            self._living()
        info = super().get_info()
        usage = self.box.usage() if self.box is not None else None
        if usage is not None:
            info.metadata["usage"] = asdict(usage)
        return info

    @property
    def _ending(self) -> bool:
        """Whether the sandbox has been told to stop."""
        return self.status in (SandboxStatus.STOPPING, SandboxStatus.STOPPED)

    def _living(self) -> Box:
        """Return the box. Raises `SandboxLost` if there is none, or if it has died, which is noted as a failure."""
        if self.box is None:
            raise SandboxLost(f"sandbox {self.id} is {self.status.value}")
        if not self.box.alive and self.status.active:
            self.fail("the sandbox died")
        if not self.box.alive:
            raise SandboxLost(self.metadata.get("error", "the sandbox died"))
        return self.box


def _not_begun(command: str | list[str]) -> CommandResult:
    words = "The command was stopped before it began."
    return CommandResult(command=command, status=ExecutionStatus.CANCELLED, exit_code=STOPPED, stderr=words)


def _bytes(name: str, given: object, encoding: str = "utf-8") -> bytes:
    """Return text or bytes as bytes. Raises `InvalidCall` naming the field for anything else."""
    if isinstance(given, str):
        return given.encode(encoding)
    try:
        return bytes(memoryview(given))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidCall(f"{name}: it must be text or bytes, not {type(given).__name__}") from None


def _check_words(words: Iterable[str]) -> None:
    """Raise `InvalidCall` if a process cannot be given one of these as an argument."""
    for word in words:
        try:
            valid = "\0" not in word and (word.isascii() or bool(word.encode()))
        except UnicodeEncodeError:
            valid = False
        if not valid:
            raise InvalidCall(f"command: {word[:40]!r} contains a NUL or an unpaired surrogate")
