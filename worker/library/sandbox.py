"""What a sandbox of any type is to its user: a life, commands, tools."""

import asyncio
import base64
import functools
import io
import logging
import secrets
import tarfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, Self

from schemas.job import ALIASES
from schemas.sandbox import CommandResult, SandboxConfig, SandboxInfo, SandboxStatus, ToolResult
from worker.sandbox.base import Command, Hear, Running
from worker.tools.base import Tool, command_result
from worker.tools.registry import ToolFactory

log = logging.getLogger("evalpool.sandbox")

ALPHABET = "23456789abcdefghijkmnopqrstuvwxyz"
Heed = Callable[[str, str], None]
"""Told of a line of output while a command runs: `stdout` or `stderr`, and the line."""


GIVEN = "import base64, io, sys; sys.stdin = io.TextIOWrapper(io.BytesIO(base64.b64decode('%s')))\n"


class Lines:
    """`async for stream, line in …`; and the `result` of the command, when they have ended."""

    def __init__(self, execute: Callable[[Heed], Awaitable[CommandResult]]) -> None:
        self._execute = execute
        self._told: deque[tuple[str, io.StringIO]] = deque()
        """Runs of lines of one stream, each as one text: millions of empty lines take no more room than that."""
        self._more = asyncio.Event()
        self.result: CommandResult | None = None

    async def __aiter__(self) -> AsyncIterator[tuple[str, str]]:
        running = asyncio.ensure_future(self._execute(self._heed))
        running.add_done_callback(lambda _: self._more.set())
        try:
            while self._told or not running.done():
                await self._more.wait()
                self._more.clear()
                while self._told:
                    name, lines = self._told.popleft()
                    lines.seek(0)
                    for line in lines:
                        yield name, line.removesuffix("\n")
                    await asyncio.sleep(0)  # others want to go on, too
            self.result = await running
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait((running,))
            if not running.cancelled():
                running.exception()  # who left early does not ask

    def _heed(self, name: str, line: str) -> None:
        if not self._told or self._told[-1][0] != name:
            self._told.append((name, io.StringIO(newline="\n")))
        self._told[-1][1].write(f"{line}\n")
        self._more.set()


class Sandbox(ABC):
    """Started and stopped by `async with`. To add a type, subclass it and register it with `register_sandbox`."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Those of other people may give a tuple for a command: it is made a `CommandResult`, whoever asks."""
        super().__init_subclass__(**more)
        own = cls.__dict__.get("execute_command")
        if own is not None:

            @functools.wraps(own)
            async def execute_command(self: Any, command: str | list[str], *args: Any, **named: Any) -> CommandResult:
                return command_result(command, await own(self, command, *args, **named))

            cls.execute_command = execute_command  # type: ignore[method-assign]

    def __init__(self, config: SandboxConfig, sandbox_id: str | None = None) -> None:
        self.id = sandbox_id or "".join(secrets.choice(ALPHABET) for _ in range(8))
        self.config = config
        self.status = SandboxStatus.INITIALIZING
        self.created_at = self.updated_at = datetime.now()
        self.metadata: dict[str, Any] = {}
        self._tools: dict[str, Tool] = {}

    other_types: tuple[str, ...] = ()
    """Types whose tools work in it as well."""

    @property
    @abstractmethod
    def sandbox_type(self) -> str:
        """The type it is registered as."""

    @abstractmethod
    async def start(self) -> None:
        """Make it ready, set it `RUNNING`, and call `initialize_tools`."""

    @abstractmethod
    async def stop(self) -> None:
        """End it; `STOPPED` afterwards."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Let go of whatever is left. May be called at any time, and twice."""

    @abstractmethod
    async def get_execution_context(self) -> Any:
        """What tools can work with directly, such as a container; or nothing."""

    async def execute_command(
        self,
        command: str | list[str],
        timeout: float | None = None,
        stream: bool | Heed = True,
        *,
        stdin: str | bytes = b"",
    ) -> CommandResult:
        """A command, to its end; a string is a line for a shell. Its lines are logged as they come, or told to whom
        `stream` names. May be called while others run."""
        raise NotImplementedError(f"{type(self).__name__} executes no commands")

    def stream_command(self, command: str | list[str], timeout: float | None = None) -> "Lines":
        """The lines of a command while it runs, each with the name of its stream; then `result` says how it ended.
        Leaving the loop early ends the command."""
        return Lines(lambda heed: self.execute_command(command, timeout, heed))

    async def execute_python(
        self,
        code: str,
        timeout: float | None = None,
        *,
        args: tuple[str, ...] = (),
        stdin: str | bytes = b"",
        encoding: str = "utf-8",
    ) -> CommandResult:
        """A Python program, to its end."""
        data = stdin.encode() if isinstance(stdin, str) else stdin
        given = GIVEN % base64.b64encode(data).decode() if data else ""
        return await self.execute_command(["python3", "-c", given + code, *args], timeout)

    async def execute(self, command: Command, stdin: str | bytes = b"") -> CommandResult:
        """A command in full detail."""
        raise NotImplementedError(f"{type(self).__name__} cannot execute a command with files and a folder of its own")

    async def spawn(self, command: Command, hear: Hear) -> Running:
        """Start a command that stays."""
        raise NotImplementedError(f"{type(self).__name__} cannot keep an interpreter")

    async def put_archive(self, target_dir: str, data: bytes) -> bool:
        """Unpack a tar archive in a folder of the sandbox."""
        raise NotImplementedError(f"{type(self).__name__} does not support put_archive")

    async def put_dir(self, source_dir: str | Path, target_dir: str) -> bool:
        """Copy a folder of the host into one of the sandbox."""
        return await self.put_archive(target_dir, await asyncio.to_thread(_packed, Path(source_dir)))

    async def put_file(self, file_path: str, content: str | bytes, encoding: str = "utf-8") -> bool:
        """Write text or bytes to a file of the sandbox; relative paths begin in the working folder."""
        path = PurePosixPath(self.config.working_dir, file_path)
        if not path.name:
            raise ValueError(f"file_path: {file_path!r} is no file")
        data = content.encode(encoding) if isinstance(content, str) else content
        return await self.put_archive(str(path.parent), _archive({path.name: data}))

    async def get_archive(self, source_dir: str) -> bytes:
        """A folder of the sandbox as a tar archive: plain files and folders."""
        raise NotImplementedError(f"{type(self).__name__} does not support get_archive")

    async def get_file(self, file_path: str) -> bytes:
        """A file of the sandbox."""
        raise NotImplementedError(f"{type(self).__name__} does not support get_file")

    async def initialize_tools(self) -> None:
        """Make the tools of its configuration; calling it again changes nothing."""
        for name, options in self.config.tools_config.items():
            if name in self._tools:
                continue
            self.add_tool(ToolFactory.create_tool(name, **options), name)

    def add_tool(self, tool: Tool, name: str | None = None) -> None:
        """Offer a tool, if it is for this type of sandbox."""
        needed = tool.required_sandbox_types
        if needed and {self.sandbox_type, *self.other_types}.isdisjoint(needed):
            log.warning("sandbox %s: the tool %r needs another type of sandbox", self.id, tool.name)
        elif tool.enabled:
            self._tools[name or tool.name] = tool

    def get_tool(self, tool_name: str) -> Tool | None:
        """By its name, or another one for it."""
        others = [ALIASES.get(tool_name, tool_name), *(new for new, old in ALIASES.items() if old == tool_name)]
        return next((self._tools[name] for name in (tool_name, *others) if name in self._tools), None)

    def list_tools(self) -> list[str]:
        """The names of its tools."""
        return list(self._tools)

    def get_available_tools(self) -> dict[str, Any]:
        """Its tools, each in the form in which models are told of functions."""
        schemas = {name: tool.schema for name, tool in self._tools.items()}
        for name, schema in schemas.items():
            schema["function"]["name"] = name
        return schemas

    async def execute_tool(self, tool_name: str, parameters: dict[str, Any] | None = None) -> ToolResult:
        """What a tool does with these parameters. Its failure is a result; `ValueError` where there is no such tool."""
        if not self.status.active:
            raise ValueError(f"Sandbox {self.id} is not active (status: {self.status.value})")
        tool = self.the_tool(tool_name)
        return (await tool(self, parameters or {})).model_copy(update={"tool_name": tool_name})

    def the_tool(self, tool_name: str) -> Tool:
        """The one of this name, or `ValueError`."""
        tool = self.get_tool(tool_name)
        if tool is None:
            raise ValueError(f"Tool {tool_name} is not available; this sandbox has {', '.join(self._tools) or 'none'}")
        return tool

    def update_status(self, status: SandboxStatus) -> None:
        """Move on; what cannot be is refused."""
        if not self.status.may_become(status):
            raise ValueError(f"sandbox {self.id}: {self.status.value} cannot become {status.value}")
        self.status, self.updated_at = status, datetime.now()

    def fail(self, error: BaseException | str) -> None:
        """It is broken, and this is why."""
        self.metadata["error"] = str(error) or repr(error)
        self.update_status(SandboxStatus.ERROR)
        log.warning(
            "sandbox %s: %s", self.id, self.metadata["error"], extra={"sandbox": self.id, "action": "sandbox_error"}
        )

    def get_info(self) -> SandboxInfo:
        """How it is now."""
        return SandboxInfo(
            id=self.id,
            status=self.status,
            type=str(self.sandbox_type),
            config=self.config.model_dump(mode="json", exclude_none=True),
            created_at=self.created_at,
            updated_at=self.updated_at,
            metadata=dict(self.metadata),
            available_tools=self.get_available_tools(),
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def _packed(source: Path) -> bytes:
    """A folder as a tar archive."""
    source = source.expanduser()
    if not source.is_dir():
        raise FileNotFoundError(f"put_dir: {source} is not a folder")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path in sorted(source.iterdir()):
            archive.add(path, path.name)
    return data.getvalue()


def _archive(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return data.getvalue()
