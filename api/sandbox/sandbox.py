"""The interface of a sandbox of any type: start and stop, commands, files and tools."""

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

from evalpool.schemas.errors import InvalidCall
from evalpool.schemas.job import ALIASES
from evalpool.schemas.sandbox import CommandResult, SandboxConfig, SandboxInfo, SandboxStatus, ToolResult
from evalpool.worker.sandbox.base import Command, Hear, Running
from evalpool.worker.tools.base import Tool, command_result
from evalpool.worker.tools.registry import ToolFactory

log = logging.getLogger("evalpool.sandbox")

ALPHABET = "23456789abcdefghijkmnopqrstuvwxyz"
Listener = Callable[[str, str], None]
"""A function that is called for each line of output while a command runs: with `stdout` or `stderr`, and the line."""
GIVEN = "import base64, io, sys; sys.stdin = io.TextIOWrapper(io.BytesIO(base64.b64decode('%s')))\n"


class Lines:
    """Iterates over the output of a command: `async for stream, line in …`. Afterwards, `result` is its result."""

    def __init__(self, execute: Callable[[Listener], Awaitable[CommandResult]]) -> None:
        self._execute = execute
        self._queue: deque[tuple[str, io.StringIO]] = deque()
        """Consecutive lines of one stream, as one text: millions of empty lines would take far more memory as
        strings."""
        self._more = asyncio.Event()
        self.result: CommandResult | None = None

    async def __aiter__(self) -> AsyncIterator[tuple[str, str]]:
        running = asyncio.ensure_future(self._execute(self._listen))
        running.add_done_callback(lambda _: self._more.set())
        try:
            while self._queue or not running.done():
                await self._more.wait()
                self._more.clear()
                while self._queue:
                    name, lines = self._queue.popleft()
                    lines.seek(0)
                    for line in lines:
                        yield name, line.removesuffix("\n")
                    await asyncio.sleep(0)  # let other coroutines run
            self.result = await running
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait((running,))
            if not running.cancelled():
                running.exception()  # a caller that left the loop early does not ask for it

    def _listen(self, name: str, line: str) -> None:
        if not self._queue or self._queue[-1][0] != name:
            self._queue.append((name, io.StringIO(newline="\n")))
        self._queue[-1][1].write(f"{line}\n")
        self._more.set()


class Sandbox(ABC):
    """A sandbox of any type; `async with` starts and stops it. To add a type, register a subclass with
    `register_sandbox`."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Let `execute_command` of a subclass return a plain tuple, which becomes a `CommandResult`."""
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
    """Other types whose tools also work in this sandbox."""

    @property
    @abstractmethod
    def sandbox_type(self) -> str:
        """The name under which the type is registered."""

    @abstractmethod
    async def start(self) -> None:
        """Make the sandbox ready, set its status to `RUNNING`, and call `initialize_tools`."""

    @abstractmethod
    async def stop(self) -> None:
        """End the sandbox, and set its status to `STOPPED`."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Release all resources. It may be called at any time, and more than once."""

    @abstractmethod
    async def get_execution_context(self) -> Any:
        """Return the object that tools can work with directly, for example a container, or `None`."""

    async def execute_command(
        self,
        command: str | list[str],
        timeout: float | None = None,
        stream: bool | Listener = True,
        *,
        stdin: str | bytes = b"",
    ) -> CommandResult:
        """Run a command to its end. A string is a command line for a shell. The lines of output are logged as they
        come, or passed to the function `stream`. Several commands may run at the same time."""
        raise NotImplementedError(f"{type(self).__name__} cannot execute commands")

    def stream_command(self, command: str | list[str], timeout: float | None = None) -> "Lines":
        """Run a command and iterate over its lines, each with the name of its stream. Afterwards, `result` is its
        result. Leaving the loop early ends the command."""
        return Lines(lambda listener: self.execute_command(command, timeout, listener))

    async def execute_python(
        self,
        code: str,
        timeout: float | None = None,
        *,
        args: tuple[str, ...] = (),
        stdin: str | bytes = b"",
        encoding: str = "utf-8",
    ) -> CommandResult:
        """Run a Python program to its end."""
        data = stdin.encode() if isinstance(stdin, str) else stdin
        given = GIVEN % base64.b64encode(data).decode() if data else ""
        return await self.execute_command(["python3", "-c", given + code, *args], timeout)

    async def execute(self, command: Command, stdin: str | bytes = b"") -> CommandResult:
        """Run a `Command`, which may have files and a folder of its own, to its end."""
        raise NotImplementedError(f"{type(self).__name__} cannot execute a command with files and a folder of its own")

    async def spawn(self, command: Command, hear: Hear) -> Running:
        """Start a command and return at once."""
        raise NotImplementedError(f"{type(self).__name__} cannot start a command in the background")

    async def put_archive(self, target_dir: str, data: bytes) -> bool:
        """Unpack a tar archive in a folder of the sandbox. Returns `True`."""
        raise NotImplementedError(f"{type(self).__name__} does not support put_archive")

    async def put_dir(self, source_dir: str | Path, target_dir: str) -> bool:
        """Copy a folder of the host into a folder of the sandbox. Returns `True`."""
        return await self.put_archive(target_dir, await asyncio.to_thread(_packed, Path(source_dir)))

    async def put_file(self, file_path: str, content: str | bytes, encoding: str = "utf-8") -> bool:
        """Write text or bytes to a file of the sandbox. Relative paths begin in the working folder."""
        path = PurePosixPath(self.config.working_dir, file_path)
        if not path.name:
            raise InvalidCall(f"file_path: {file_path!r} is not the path of a file")
        data = content.encode(encoding) if isinstance(content, str) else content
        return await self.put_archive(str(path.parent), _archive({path.name: data}))

    async def get_archive(self, source_dir: str) -> bytes:
        """Return a folder of the sandbox as a tar archive of regular files and folders."""
        raise NotImplementedError(f"{type(self).__name__} does not support get_archive")

    async def get_file(self, file_path: str) -> bytes:
        """Return the content of a file of the sandbox."""
        raise NotImplementedError(f"{type(self).__name__} does not support get_file")

    async def initialize_tools(self) -> None:
        """Create the tools of the configuration. Calling it again changes nothing."""
        for name, options in self.config.tools_config.items():
            if name in self._tools:
                continue
            self.add_tool(ToolFactory.create_tool(name, **options), name)

    def add_tool(self, tool: Tool, name: str | None = None) -> None:
        """Add a tool, if it is meant for this type of sandbox."""
        needed = tool.required_sandbox_types
        if needed and {self.sandbox_type, *self.other_types}.isdisjoint(needed):
            log.warning(
                "sandbox %s: the tool %r was left out, since it needs another type of sandbox", self.id, tool.name
            )
        elif tool.enabled:
            self._tools[name or tool.name] = tool

    def get_tool(self, tool_name: str) -> Tool | None:
        """Return the tool with this name or alias, or `None`."""
        others = [ALIASES.get(tool_name, tool_name), *(new for new, old in ALIASES.items() if old == tool_name)]
        return next((self._tools[name] for name in (tool_name, *others) if name in self._tools), None)

    def list_tools(self) -> list[str]:
        """Return the names of the tools."""
        return list(self._tools)

    def get_available_tools(self) -> dict[str, Any]:
        """Return the tools as function schemas for a model, by name."""
        schemas = {name: tool.schema for name, tool in self._tools.items()}
        for name, schema in schemas.items():
            schema["function"]["name"] = name
        return schemas

    async def execute_tool(self, tool_name: str, parameters: dict[str, Any] | None = None) -> ToolResult:
        """Execute a tool and return its result, which may be a failure. Raises `InvalidCall` if there is no such
        tool."""
        if not self.status.active:
            raise InvalidCall(f"Sandbox {self.id} is not active (status: {self.status.value})")
        tool = self.the_tool(tool_name)
        return (await tool(self, parameters or {})).model_copy(update={"tool_name": tool_name})

    def the_tool(self, tool_name: str) -> Tool:
        """Return the tool with this name. Raises `InvalidCall` if there is none."""
        tool = self.get_tool(tool_name)
        if tool is None:
            raise InvalidCall(f"Tool {tool_name} is not available; this sandbox has {', '.join(self._tools) or 'none'}")
        return tool

    def update_status(self, status: SandboxStatus) -> None:
        """Change the status. Raises `InvalidCall` if the change is not possible."""
        if not self.status.may_become(status):
            raise InvalidCall(f"sandbox {self.id}: {self.status.value} cannot become {status.value}")
        self.status, self.updated_at = status, datetime.now()

    def fail(self, error: BaseException | str) -> None:
        """Mark the sandbox as broken, for this reason."""
        self.metadata["error"] = str(error) or repr(error)
        self.update_status(SandboxStatus.ERROR)
        log.warning(
            "sandbox %s: %s", self.id, self.metadata["error"], extra={"sandbox": self.id, "action": "sandbox_error"}
        )

    def get_info(self) -> SandboxInfo:
        """Return the present state of the sandbox."""
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
    """Return a folder as a tar archive."""
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
