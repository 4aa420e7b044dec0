"""The types that come with evalpool. Each drives a sandbox of the worker's own kind, in a session."""

import asyncio
import logging
import os
import re
import sys
import tarfile
import threading
from abc import abstractmethod
from contextlib import suppress
from dataclasses import asdict, replace

from schemas.errors import SandboxLost
from schemas.sandbox import (
    CommandResult,
    DockerSandboxConfig,
    ExecutionStatus,
    SandboxConfig,
    SandboxInfo,
    SandboxStatus,
    SandboxType,
)
from schemas.settings import settings
from worker.library import volumes
from worker.library.factory import register_sandbox
from worker.library.sandbox import Heed, Sandbox
from worker.sandbox.base import STDERR, STDOUT, Command, Outcome, Shape
from worker.sandbox.base import Sandbox as Box
from worker.sandbox.docker import DockerSandbox as Container
from worker.sandbox.engine import Engine
from worker.sandbox.fake import FakeSandbox
from worker.sandbox.local import LocalSandbox, bubblewrap
from worker.tools.files import confined

log = logging.getLogger("evalpool.sandbox")

AT_ONCE = 16
"""Commands of one sandbox at a time; more wait."""
KERNELS = 2
"""Interpreters that stay, beside them."""
KEEPERS_MIB = 32
"""What those need of ours that watch all of them."""
SHELL = 'if command -v bash > /dev/null; then exec bash -c "$0"; fi; exec sh -c "$0"'
UNPACK = """
import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|*") as archive:
    for entry in archive:
        if entry.name.startswith("/") or ".." in entry.name.split("/"):
            sys.exit(entry.name + " leads out of the folder")
        if entry.isfile() or entry.isdir() or entry.issym():
            entry.mode |= 0o700 if entry.isdir() else 0o600
            archive.extract(entry, sys.argv[1])
"""
NAMES = {STDOUT: "stdout", STDERR: "stderr"}


class BoxSandbox(Sandbox):
    """One that is made of a box of ours."""

    def __init__(self, config: SandboxConfig, sandbox_id: str | None = None) -> None:
        super().__init__(config, sandbox_id)
        self.box: Box | None = None
        self._turns = asyncio.Semaphore(AT_ONCE)

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
        if self.status.active:
            return
        if self.status is not SandboxStatus.INITIALIZING:
            self.update_status(SandboxStatus.INITIALIZING)
        try:
            self.box = await self._make()
            self.metadata |= {"container_id": self.box.id, "image_digest": self.box.image_digest}
            self.metadata.pop("error", None)
            self._tools.clear()
            await self.initialize_tools()
            self.update_status(SandboxStatus.RUNNING)
            await self._prepare()
        except BaseException as error:
            await self.cleanup()
            self.fail(error)
            raise

    async def _prepare(self) -> None:
        """What is to be done when it runs."""

    async def stop(self) -> None:
        if self.status is SandboxStatus.STOPPED:
            return
        broken = self.status is SandboxStatus.ERROR
        try:
            if not broken:
                self.update_status(SandboxStatus.STOPPING)
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
        if self.box is None or not await self.box.reset():
            return False
        self._tools.clear()
        await self.initialize_tools()
        return True

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
        argv = ("sh", "-c", SHELL, command) if isinstance(command, str) else tuple(command)
        if not argv:
            raise ValueError("command: it is empty")
        done = await self.execute(Command(argv=argv, wall_seconds=timeout or self.config.timeout), stdin, stream)
        return done.model_copy(update={"command": command})

    async def execute_python(
        self,
        code: str,
        timeout: float | None = None,
        *,
        args: tuple[str, ...] = (),
        stdin: str | bytes = b"",
        encoding: str = "utf-8",
    ) -> CommandResult:
        command = Command(code=code.encode(), args=args, wall_seconds=timeout or self.config.timeout)
        return await self.execute(command, stdin, encoding=encoding)

    async def execute(
        self, command: Command, stdin: str | bytes = b"", stream: bool | Heed = False, *, encoding: str = "utf-8"
    ) -> CommandResult:
        command = replace(
            command, env=self.config.env_vars | command.env, output_bytes=self.config.resource_limits.output_bytes
        )
        output = Output(self.id, stream)
        await self._turns.acquire()
        try:
            running = self._living().spawn(command, output.hear)
        except BaseException:
            self._turns.release()
            raise
        running.over.add_done_callback(lambda _: self._turns.release())  # not before: it may outlive its caller
        try:
            running.feed(stdin.encode() if isinstance(stdin, str) else stdin, last=True)
            outcome = await asyncio.shield(running.over)
        except SandboxLost as error:
            if self.status is not SandboxStatus.STOPPING:
                self.fail(error)
            raise
        except asyncio.CancelledError:
            running.stop()  # nobody waits for it any more
            raise
        return output.result(command, outcome, encoding)

    async def put_archive(self, target_dir: str, data: bytes) -> bool:
        if not data:
            raise ValueError("data: Archive body must not be empty")
        path = confined(target_dir, self.config.working_dir)
        if path is None:
            raise ValueError(f"target_dir: {target_dir} is outside of {self.config.working_dir}")
        await self.execute_command(["mkdir", "-p", path])
        done = await self.execute_python(UNPACK, args=(path,), stdin=data)
        if done.status is not ExecutionStatus.SUCCESS:
            words = done.stderr.strip().splitlines()
            raise tarfile.TarError(f"put_archive: {words[-1] if words else done.status.value}")
        return True

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


class Output:
    """What a command says, kept; and its lines, told as they come."""

    def __init__(self, sandbox: str, stream: bool | Heed) -> None:
        self._sandbox, self._stream = sandbox, stream
        self._kept = {STDOUT: bytearray(), STDERR: bytearray()}
        self._told = {STDOUT: 0, STDERR: 0}
        self._problem: Exception | None = None

    def hear(self, stream: int, data: bytes) -> None:
        """More of it."""
        if stream not in self._kept:
            return
        kept = self._kept[stream]
        kept += data
        if self._stream is not False:
            self._tell(stream, kept.rfind(b"\n") + 1)

    def _tell(self, stream: int, end: int) -> None:
        start, self._told[stream] = self._told[stream], max(end, self._told[stream])
        for line in self._kept[stream][start:end].splitlines():
            text = line.decode("utf-8", "replace")
            if callable(self._stream):
                try:
                    self._stream(NAMES[stream], text)
                except Exception as error:  # the caller's own: it is raised where the caller is
                    self._problem, self._stream = error, False
                    return
            else:
                log.debug("%s %s: %s", self._sandbox, NAMES[stream], text)

    def result(self, command: Command, outcome: Outcome, encoding: str) -> CommandResult:
        """All of it."""
        for stream in self._kept if self._stream is not False else ():
            self._tell(stream, len(self._kept[stream]))  # a last line without an end
        if self._problem is not None:
            raise self._problem
        status, code = ExecutionStatus.ERROR, outcome.exit_code
        if code is None:
            code = 128 + (outcome.signal or 0)
        if outcome.ended == "wall":
            status, code = ExecutionStatus.TIMEOUT, 124
        elif outcome.ended == "stopped":
            status = ExecutionStatus.CANCELLED
        elif outcome.ended == "itself" and code == 0:
            status = ExecutionStatus.SUCCESS
        texts = {stream: bytes(kept[: command.output_bytes]) for stream, kept in self._kept.items()}
        stderr = texts[STDERR].decode("utf-8", "replace")
        if outcome.ended == "output":
            stderr += f"\nIt was stopped: it wrote more than {command.output_bytes:,} bytes."
        elif outcome.oom_kills and outcome.signal == 9:
            stderr += "\nIt was killed for memory."
        return CommandResult(
            command=list(command.argv),
            status=status,
            exit_code=code,
            stdout=texts[STDOUT].decode(encoding, "replace"),
            stderr=stderr,
            metadata={
                "exit_code": outcome.exit_code,
                "signal": outcome.signal,
                "ended": outcome.ended,
                "oom_killed": outcome.oom_kills > 0,
                "wall_seconds": outcome.wall_seconds,
                "cpu_seconds": outcome.cpu_seconds,
                "peak_memory_bytes": outcome.memory_bytes,
            },
        )


class Engines:
    """One connection to Docker for all sandboxes of a process, for as long as there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._engine: Engine | None = None

    def take(self) -> Engine:
        """For one sandbox."""
        with self._lock:
            self._users += 1
            if self._engine is None:
                self._engine = Engine(settings().docker_timeout)
            return self._engine

    def give_back(self) -> None:
        """By it, when it is gone."""
        with self._lock:
            self._users -= 1
            if not self._users and self._engine is not None:
                engine, self._engine = self._engine, None
                threading.Thread(target=engine.close).start()


engines = Engines()

_PYTHON = re.compile(r"(docker\.io/)?(library/)?python:3(\.11(\.\d+)?)?(-slim)?(-bookworm)?")


@register_sandbox(SandboxType.DOCKER)
class DockerSandbox(BoxSandbox):
    """A hardened container, with evalpool's agent in it."""

    config: DockerSandboxConfig
    _engine: Engine | None = None

    @property
    def sandbox_type(self) -> str:
        return SandboxType.DOCKER

    def _own_image(self) -> str:
        """The one of the settings that suits its tools."""
        now = settings()
        if "notebook_executor" in self.config.tools_config or self.sandbox_type == SandboxType.DOCKER_NOTEBOOK:
            return now.notebook_image
        return now.code_image if "multi_code_executor" in self.config.tools_config else now.image

    async def _make(self) -> Box:
        self._engine = engine = engines.take()
        asked, own = self.config.image, self._own_image()
        image = asked or own
        if asked is not None and not await engine.call(engine.has, asked):
            stands_for = _PYTHON.fullmatch(asked) or asked.startswith(("jupyter-kernel-gateway", "volcengine/sandbox-"))
            if stands_for:
                log.warning("sandbox %s: there is no image %s here; %s takes its place", self.id, asked, own)
                image = own
        self.config = self.config.model_copy(update={"image": image})
        box = Container(replace(self.shape, image=image), engine, settings=settings())
        await box.start()
        return box

    async def _prepare(self) -> None:
        await volumes.copy_in(self, self.config.volumes)

    async def stop(self) -> None:
        if self.status.active:
            with suppress(SandboxLost):
                await volumes.copy_out(self, self.config.volumes)
        await super().stop()

    async def cleanup(self) -> None:
        await super().cleanup()
        engine, self._engine = self._engine, None
        if engine is not None:
            engines.give_back()


@register_sandbox(SandboxType.DOCKER_NOTEBOOK)
class NotebookSandbox(DockerSandbox):
    """The same, with an image that notebooks feel at home in."""

    @property
    def sandbox_type(self) -> str:
        return SandboxType.DOCKER_NOTEBOOK


@register_sandbox(SandboxType.LOCAL_PROCESS)
class LocalProcessSandbox(BoxSandbox):
    """Processes of this machine, for where there is no Docker. Nobody gets it who does not ask for it by name."""

    @property
    def sandbox_type(self) -> str:
        return SandboxType.LOCAL_PROCESS

    async def _make(self) -> Box:
        walls = bubblewrap() is not None
        if not walls:
            message = (
                "LOCAL_PROCESS without bubblewrap: commands run as your own user, with your files and your network. "
                "Run only what you trust, or install it (Debian: apt-get install bubblewrap)."
            )
            log.warning(message, extra={"sandbox": self.id, "action": "no_walls"})
            print(f"evalpool: WARNING: {message}", file=sys.stderr)  # noqa: T201 - loud, whatever logging is set to
        self.metadata |= {"walls": "bubblewrap" if walls else "none", "pid": os.getpid()}
        box = LocalSandbox(self.shape, walls=walls)
        await box.start()
        return box


@register_sandbox(SandboxType.DUMMY)
class DummySandbox(BoxSandbox):
    """The fake that evalpool's own tests use: no walls at all."""

    @property
    def sandbox_type(self) -> str:
        return SandboxType.DUMMY

    async def _make(self) -> Box:
        box = FakeSandbox(self.shape)
        await box.start()
        return box
