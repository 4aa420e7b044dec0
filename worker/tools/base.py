"""A tool is one way to execute something in a sandbox, described so that a model can call it.

The same classes are used in two ways. In a caller's own sandbox, a tool is executed with parameters. For a queued job,
the tool that the job names turns it into programs.
"""

import base64
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evalpool.schemas.base import first_problem
from evalpool.schemas.errors import InvalidConfig, SandboxLost
from evalpool.schemas.job import Case, JobSpec
from evalpool.schemas.sandbox import LONGEST_SECONDS, CommandResult, ExecutionStatus, SandboxConfig, ToolResult
from evalpool.worker.sandbox.base import Command, Hear, Program, Running

log = logging.getLogger("evalpool.tools")


class ToolParameters(BaseModel):
    """The parameters of a call. Unknown names are refused."""

    model_config = ConfigDict(extra="forbid")


Seconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS, allow_inf_nan=False)]


class ToolOptions(BaseModel):
    """The options of a tool in `tools_config`."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    timeout: Seconds | None = None
    """The time limit in seconds of calls that do not name one."""


class Place(Protocol):
    """What a tool needs of a sandbox, whatever its type."""

    config: SandboxConfig

    async def execute_command(
        self, command: str | list[str], timeout: float | None = None, stream: Any = True, *, stdin: str | bytes = b""
    ) -> CommandResult:
        """Run a command to its end."""

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

    async def execute(self, command: Command, stdin: str | bytes = b"") -> CommandResult:
        """Run a command with files and a folder of its own; only our own types of sandbox can do this."""

    async def spawn(self, command: Command, hear: Hear) -> Running:
        """Start a command that goes on running; only our own types of sandbox can do this."""


class Tool(ABC):
    """A tool has a name, parameters and a result. To add one, register a subclass with `register_tool`."""

    name: ClassVar[str]
    Parameters: ClassVar[type[BaseModel]] = ToolParameters
    Options: ClassVar[type[ToolOptions]] = ToolOptions
    description: ClassVar[str] = ""
    """What the tool is for, for people and models. Registration sets it to the docstring of the class if the class does
    not set it itself. Our own tools do, since `python -OO` removes docstrings."""
    required_sandbox_types: ClassVar[tuple[str, ...]] = ()
    """The types of sandbox in which the tool works; empty for all types."""

    def __init__(self, **options: Any) -> None:
        try:
            self.options = self.Options.model_validate(options)
        except ValidationError as error:
            raise InvalidConfig(f"tools_config.{self.name}: {first_problem(error, self.Options)}") from None

    @abstractmethod
    async def execute(self, sandbox_context: Any, *args: Any, **parameters: Any) -> ToolResult | str:
        """Execute the tool. A plain text as a result is a success."""

    @property
    def enabled(self) -> bool:
        """Whether the tool is offered."""
        return self.options.enabled

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the JSON form in which models are given functions."""
        parameters = self.Parameters.model_json_schema()
        for part in (parameters, *parameters.get("properties", {}).values()):
            part.pop("title", None)
        parameters.pop("description", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    async def __call__(self, sandbox: Place, parameters: dict[str, Any]) -> ToolResult:
        """Validate the parameters and execute the tool. A failure is a result, and not an exception."""
        began = time.monotonic()
        try:
            given = self.Parameters.model_validate(parameters)
            done = await self.execute(sandbox, **{name: getattr(given, name) for name in type(given).model_fields})
            result = done if isinstance(done, ToolResult) else self.result(done)
        except ValidationError as error:
            result = self.failure(f"Invalid input: {first_problem(error, self.Parameters)}")
        except SandboxLost as error:
            result = self.failure(f"The sandbox was lost: {error}")
        except NotImplementedError as error:  # a sandbox of another type cannot do this, and says so
            result = self.failure(str(error))
        except Exception as error:  # the tool may be anybody's, and a model can only act on what it is told
            log.warning("the tool %s failed", self.name, exc_info=True, extra={"action": "tool_failed"})
            result = self.failure(f"{type(error).__name__}: {error}")
        return result.model_copy(update={"execution_time": time.monotonic() - began})

    def seconds(self, sandbox: Place, timeout: float | None) -> float:
        """Return the time limit of a call in seconds: its own, or that of the tool, or that of the sandbox."""
        return timeout or self.options.timeout or sandbox.config.timeout

    def result(self, output: Any, **more: Any) -> ToolResult:
        """Return a result, which is a success unless `status` says otherwise."""
        return ToolResult(**{"tool_name": self.name, "status": ExecutionStatus.SUCCESS, "output": output, **more})

    def failure(self, error: str, **more: Any) -> ToolResult:
        """Return a failure with this message."""
        return self.result(**{"output": "", "status": ExecutionStatus.ERROR, "error": error, **more})

    def of_command(self, done: CommandResult, timeout: float, what: str = "Execution") -> ToolResult:
        """Return the result of a command: its output, and what it wrote to standard error or why it failed."""
        words = {
            ExecutionStatus.SUCCESS: None,
            ExecutionStatus.TIMEOUT: f"{what} timed out after {timeout:g} seconds",
            ExecutionStatus.CANCELLED: f"{what} was stopped",
            ExecutionStatus.ERROR: f"{what} failed with exit code {done.exit_code}",
        }
        error = done.stderr or words[done.status]
        return self.result(done.stdout, status=done.status, error=error, metadata=done.metadata)


def command_result(command: str | list[str], done: Any) -> CommandResult:
    """Return the result of a command, for which sandboxes of other people may give a tuple: exit code, stdout,
    stderr."""
    if isinstance(done, CommandResult):
        return done
    code, stdout, stderr = done
    status = ExecutionStatus.SUCCESS if code == 0 else ExecutionStatus.ERROR
    return CommandResult(command=command, status=status, exit_code=code, stdout=stdout, stderr=stderr)


def files_of(spec: JobSpec) -> dict[str, bytes]:
    """Return the files of a job as bytes."""
    return {path: _bytes(content) for path, content in spec.files.items()}


def _bytes(content: str) -> bytes:
    return base64.b64decode(content[7:]) if content.startswith("base64:") else content.encode()


class JobTool(Tool):
    """A tool that a queued job can name."""

    @abstractmethod
    def program(self, spec: JobSpec, case: Case | None, compiled: bytes | None = None) -> Program:
        """Return the program for one case of a job, or for a job without cases; `compiled` is what its compiler
        made."""

    def programs(self, spec: JobSpec, compiled: bytes | None = None) -> Iterator[Program]:
        """Yield the program for each case of a job, or for the job if it has none."""
        for case in spec.cases or (None,):
            yield self.program(spec, case, compiled)

    def compiler(self, spec: JobSpec) -> Program | None:
        """Return the compiler, which runs once and writes the compiled program to its standard output; `None` for
        most."""
        return None

    def syntax(self, spec: JobSpec) -> Program | None:
        """Return a program that fails if the job's program has a syntax error, without running it; `None` if there is
        none."""
        return None
