"""A sandbox around one of the worker's own: the types that come with evalpool differ in how theirs is made."""

import asyncio
import inspect
import re
from abc import abstractmethod
from contextlib import suppress
from dataclasses import asdict, replace

from schemas.errors import SandboxLost
from schemas.sandbox import LONGEST_SECONDS, CommandResult, ExecutionStatus, SandboxConfig, SandboxInfo, SandboxStatus
from worker.library import transfer
from worker.library.output import Output
from worker.library.sandbox import Heed, Sandbox
from worker.sandbox.base import Command, Hear, Outcome, Running, Shape
from worker.sandbox.base import Sandbox as Box

AT_ONCE = 16
"""Commands of one sandbox at a time; more wait."""
STOP_SECONDS, STOPPED = 2.0, 137
SHELL = re.compile(r"/[a-z/]*/(ba)?sh")
KERNELS = 2
"""Interpreters that stay, beside them."""
KEEPERS_MIB = 32
"""What those need of ours that watch all of them."""


class BoxSandbox(Sandbox):
    """One that is made of a box of ours."""

    keeps_tmp = False
    """Whether all commands see one `/tmp`."""

    def __init__(self, config: SandboxConfig, sandbox_id: str | None = None) -> None:
        super().__init__(config, sandbox_id)
        self.box: Box | None = None
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._life, self._gate = asyncio.Lock(), asyncio.Lock()
        """It starts and stops once at a time; and no command begins while it is reset."""
        self._running: set[Running] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lines_for = ""

    @abstractmethod
    async def _make(self) -> Box:
        """A started box of its own."""

    @property
    def shape(self) -> Shape:
        """What it is born with."""
        limits = self.config.resource_limits
        return Shape(
            "", self.config.memory_mib, limits.processes, limits.disk_mib, cpus=self.config.cpu_limit,
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
            await self._new_tools()  # first: what is wrong with their options costs no container
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
        """What is to be done when it runs."""

    async def stop(self) -> None:
        if self._loop not in (None, asyncio.get_running_loop()):
            await self.cleanup()  # its own is gone, and whoever waited there
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
                with suppress(TimeoutError):  # whoever waits for a command gets what there is of its output
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
        """As at birth again: no file, no process, no state of a tool. False where that cannot be shown."""
        async with self._gate:
            if self.box is None or not await self.box.reset():
                return False
        await self.renew()
        return True

    async def renew(self) -> None:
        """For its next user: tools that have kept nothing of earlier calls, and what it is given at its start."""
        await self._new_tools()
        await self._prepare()

    async def _new_tools(self) -> None:
        self._lines_for = ""  # it was asked where others were
        for name in self.config.tools_config:
            self._tools.pop(name, None)
        await self.initialize_tools()

    async def get_execution_context(self) -> Box:
        return self._living()

    async def execute_command(
        self,
        command: str | list[str],
        timeout: float | None = None,
        stream: bool | Heed = True,
        *,
        stdin: str | bytes = b"",
    ) -> CommandResult:
        if (
            not isinstance(command, str | list | tuple)
            or not command
            or not all(isinstance(part, str) for part in command)
        ):
            raise ValueError("command: it must be a line, or a list of a program and its arguments")
        argv = (await self._shell(), "-c", command) if isinstance(command, str) else tuple(command)
        done = await self.execute(Command(argv=argv, wall_seconds=self._seconds(timeout)), stdin, stream)
        return done.model_copy(update={"command": command})

    async def _shell(self) -> str:
        """What lines are for: bash, or what there is instead."""
        if not self._lines_for:
            look = Command(argv=("sh", "-c", "command -v bash sh"), wall_seconds=self.config.timeout)
            found = (await self.execute(look)).stdout.partition("\n")[0]
            self._lines_for = found if SHELL.fullmatch(found) else ""
        return self._lines_for or "sh"

    async def execute_python(
        self,
        code: str,
        timeout: float | None = None,
        *,
        args: tuple[str, ...] = (),
        stdin: str | bytes = b"",
        encoding: str = "utf-8",
    ) -> CommandResult:
        command = Command(code=code.encode(), args=args, wall_seconds=self._seconds(timeout))
        return await self.execute(command, stdin, encoding=encoding)

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self.config.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= LONGEST_SECONDS:
            raise ValueError(f"timeout: {timeout!r} is not a number of seconds between 0 and {LONGEST_SECONDS:,}")
        return timeout

    async def execute(
        self,
        command: Command,
        stdin: str | bytes = b"",
        stream: bool | Heed = False,
        *,
        encoding: str = "utf-8",
        output_bytes: int | None = None,
    ) -> CommandResult:
        given = stdin.encode() if isinstance(stdin, str) else bytes(memoryview(stdin))
        for words in (*command.argv, *command.args):
            if "\0" in words or (not words.isascii() and not _sayable(words)):
                raise ValueError(f"command: {words[:40]!r} is nothing that a process can be given")
        most = self.config.resource_limits.output_bytes if output_bytes is None else output_bytes
        command = replace(command, env=self.config.env_vars | command.env, output_bytes=most)
        if inspect.iscoroutinefunction(stream):
            raise TypeError("stream: it must be a plain function, which is called for each line")
        output = Output(self.id, stream)
        if asyncio.get_running_loop() is not self._loop and self.status.active:
            raise RuntimeError(f"sandbox {self.id} was started in another event loop, and works in that alone")
        turns = self._turns
        await turns.acquire()
        try:
            if turns is not self._turns:
                turns.release()  # for the next one, to be told the same
                words, argv = "It was stopped before it began.", list(command.argv)
                return CommandResult(command=argv, status=ExecutionStatus.CANCELLED, exit_code=STOPPED, stderr=words)
            running = await self.spawn(command, output.hear)
        except BaseException:
            turns.release()
            raise
        running.over.add_done_callback(lambda _: turns.release())  # not before: it may outlive its caller
        output.stop = running.stop
        try:
            running.feed(given, last=True)
            outcome = await asyncio.shield(running.over)
        except SandboxLost as error:
            if self.status.active:  # else somebody has said so, or wants it so
                self.fail(error)
            raise
        except asyncio.CancelledError:
            running.stop()  # nobody waits for it any more
            raise
        return output.result(command, outcome, encoding)

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
        """Whatever still runs, or waits for its turn."""
        self._turns = asyncio.Semaphore(AT_ONCE)
        for running in self._running:
            running.stop()
        if self._running:
            await asyncio.wait([running.over for running in self._running])

    async def put_archive(self, target_dir: str, data: bytes) -> bool:
        if not data:
            raise ValueError("data: Archive body must not be empty")
        await transfer.run(self, transfer.UNPACK, "target_dir", target_dir, data)
        return True

    async def put_file(self, file_path: str, content: str | bytes, encoding: str = "utf-8") -> bool:
        data = content.encode(encoding) if isinstance(content, str) else content
        await transfer.run(self, transfer.WRITE, "file_path", file_path, data)
        return True

    async def get_archive(self, source_dir: str) -> bytes:
        return await transfer.run(self, transfer.PACK, "source_dir", source_dir)

    async def get_file(self, file_path: str) -> bytes:
        return await transfer.run(self, transfer.READ, "file_path", file_path)

    def get_info(self) -> SandboxInfo:
        with suppress(SandboxLost):
            self._living()
        info = super().get_info()
        usage = self.box.usage() if self.box is not None else None
        if usage is not None:
            info.metadata["usage"] = asdict(usage)
        return info

    def _living(self) -> Box:
        """The box; that it has died is found out here, whoever asks."""
        if self.box is None:
            raise SandboxLost(f"sandbox {self.id} is {self.status.value}")
        if not self.box.alive and self.status.active:
            self.fail("the sandbox died")
        if not self.box.alive:
            raise SandboxLost(self.metadata.get("error", "the sandbox died"))
        return self.box


def _sayable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
