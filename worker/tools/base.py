"""A tool: one way to execute something in a sandbox, described so that a model can call it.

The same classes serve two doors. In somebody's own sandbox a tool is executed with parameters; for a queued job, the
tools that a job can name turn it into programs.
"""

import base64
import logging
import time
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.base import first_problem
from schemas.errors import SandboxLost
from schemas.job import Case, JobSpec
from schemas.sandbox import LONGEST_SECONDS, CommandResult, ExecutionStatus, SandboxConfig, ToolResult
from worker.sandbox.base import Command, Hear, Program, Running

log = logging.getLogger("evalpool.tools")


class ToolParameters(BaseModel):
    """What a tool is called with; unknown names are refused."""

    model_config = ConfigDict(extra="forbid")


Seconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS, allow_inf_nan=False)]


class ToolOptions(BaseModel):
    """What a tool is set up with, in `tools_config`."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    timeout: Seconds | None = None
    """Seconds, for calls that name none."""


class Place(Protocol):
    """What a tool asks of a sandbox, whatever its type."""

    config: SandboxConfig

    async def execute_command(
        self, command: str | list[str], timeout: float | None = None, stream: Any = True, *, stdin: str | bytes = b""
    ) -> CommandResult:
        """A command, to its end."""

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

    async def execute(self, command: Command, stdin: str | bytes = b"") -> CommandResult:
        """A command in full detail, where the sandbox is one of ours."""

    async def spawn(self, command: Command, hear: Hear) -> Running:
        """Start a command that stays, where the sandbox is one of ours."""


class Tool(ABC):
    """Has a name, parameters and a result. To add one, register a subclass with `register_tool`."""

    name: ClassVar[str]
    Parameters: ClassVar[type[BaseModel]] = ToolParameters
    Options: ClassVar[type[ToolOptions]] = ToolOptions
    required_sandbox_types: ClassVar[tuple[str, ...]] = ()
    """Types of sandbox that it needs; none: any."""

    def __init__(self, **options: Any) -> None:
        try:
            self.options = self.Options.model_validate(options)
        except ValidationError as error:
            raise ValueError(f"tools_config.{self.name}: {first_problem(error, self.Options)}") from None

    @abstractmethod
    async def execute(self, sandbox_context: Any, *args: Any, **parameters: Any) -> ToolResult | str:
        """Do it. A plain text is a success."""

    @property
    def enabled(self) -> bool:
        """Whether it is offered."""
        return self.options.enabled

    @property
    def description(self) -> str:
        """For people and models: the docstring."""
        return " ".join((type(self).__doc__ or "").split())

    @property
    def schema(self) -> dict[str, Any]:
        """In the form in which models are told of functions."""
        parameters = self.Parameters.model_json_schema()
        for part in (parameters, *parameters.get("properties", {}).values()):
            part.pop("title", None)
        parameters.pop("description", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    async def __call__(self, sandbox: Place, parameters: dict[str, Any]) -> ToolResult:
        """Validate, execute, and say what came of it: a tool that fails is a result."""
        began = time.monotonic()
        try:
            given = self.Parameters.model_validate(parameters)
            done = await self.execute(sandbox, **{name: getattr(given, name) for name in type(given).model_fields})
            result = done if isinstance(done, ToolResult) else self.result(done)
        except ValidationError as error:
            result = self.failure(f"Invalid input: {first_problem(error, self.Parameters)}")
        except SandboxLost as error:
            result = self.failure(f"The sandbox was lost: {error}")
        except NotImplementedError as error:  # of a sandbox of another type, which says so
            result = self.failure(str(error))
        except Exception as error:  # of a tool, which may be anybody's: a model can only act on what it is told
            log.warning("the tool %s failed", self.name, exc_info=True, extra={"action": "tool_failed"})
            result = self.failure(f"{type(error).__name__}: {error}")
        return result.model_copy(update={"execution_time": time.monotonic() - began})

    def seconds(self, sandbox: Place, timeout: float | None) -> float:
        """How long a call may take: as long as it says, as the tool is set up, or as the sandbox is."""
        return timeout or self.options.timeout or sandbox.config.timeout

    def result(self, output: Any, **more: Any) -> ToolResult:
        """A success, unless it is said otherwise."""
        return ToolResult(**{"tool_name": self.name, "status": ExecutionStatus.SUCCESS, "output": output, **more})

    def failure(self, error: str, **more: Any) -> ToolResult:
        """What went wrong, in words."""
        return self.result(**{"output": "", "status": ExecutionStatus.ERROR, "error": error, **more})

    def of_command(self, done: CommandResult, timeout: float, what: str = "Execution") -> ToolResult:
        """What a command did, as a result: its output, and what it wrote to standard error, or why it failed."""
        words = {
            ExecutionStatus.SUCCESS: None,
            ExecutionStatus.TIMEOUT: f"{what} timed out after {timeout:g} seconds",
            ExecutionStatus.CANCELLED: f"{what} was stopped",
            ExecutionStatus.ERROR: f"{what} failed with exit code {done.exit_code}",
        }
        error = done.stderr or words[done.status]
        return self.result(done.stdout, status=done.status, error=error, metadata=done.metadata)


def command_result(command: str | list[str], done: Any) -> CommandResult:
    """Sandboxes of other people may give a tuple: exit code, output, errors."""
    if isinstance(done, CommandResult):
        return done
    code, stdout, stderr = done
    status = ExecutionStatus.SUCCESS if code == 0 else ExecutionStatus.ERROR
    return CommandResult(command=command, status=status, exit_code=code, stdout=stdout, stderr=stderr)


def files_of(spec: JobSpec) -> dict[str, bytes]:
    """The files of a job, as bytes."""
    return {path: _bytes(content) for path, content in spec.files.items()}


def _bytes(content: str) -> bytes:
    return base64.b64decode(content[7:]) if content.startswith("base64:") else content.encode()


class JobTool(Tool):
    """A tool that a queued job can name."""

    @abstractmethod
    def program(self, spec: JobSpec, case: Case | None, compiled: bytes | None = None) -> Program:
        """The program of a job, given the input of one case, or of the job itself; and what was compiled, if it is."""

    def compiler(self, spec: JobSpec) -> Program | None:
        """What must be run once before it, and writes what is to be run to its standard output; nothing for most."""
        return None
