"""The values of the sandbox library: configurations, states and results."""

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from evalpool.schemas.base import first_problem, must_be
from evalpool.schemas.errors import InvalidConfig

HOME = "/sandbox"
LONGEST_SECONDS = 30 * 86_400
"""The longest timeout of a command."""


class SandboxType(StrEnum):
    """The types of sandboxes that come with evalpool. Others can be registered under any name."""

    DOCKER = "docker"
    DOCKER_NOTEBOOK = "docker_notebook"
    """A Docker sandbox with an image for notebooks, which has the libraries that they use."""
    LOCAL_PROCESS = "local_process"
    """Processes on a machine without Docker, isolated by bubblewrap if it is installed and not isolated otherwise."""
    DUMMY = "dummy"
    """A sandbox without isolation, for tests."""


class SandboxStatus(StrEnum):
    """The state of a sandbox."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    IDLE = "idle"
    """The sandbox waits in a pool."""
    BUSY = "busy"
    """The sandbox belongs to a pool and is in use."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    ERROR = "error"
    """The sandbox is broken; `metadata["error"]` says why."""

    @property
    def active(self) -> bool:
        """Whether tools can be executed in this state."""
        return self in (SandboxStatus.RUNNING, SandboxStatus.IDLE, SandboxStatus.BUSY)

    def may_become(self, other: "SandboxStatus") -> bool:
        """Whether a sandbox in this state may change to the other state."""
        return other is self or other in _MOVES[self]


_ENDS = {SandboxStatus.STOPPING, SandboxStatus.STOPPED, SandboxStatus.ERROR}
_MOVES = {
    SandboxStatus.INITIALIZING: {SandboxStatus.RUNNING, *_ENDS},
    SandboxStatus.RUNNING: {SandboxStatus.IDLE, SandboxStatus.BUSY, *_ENDS},
    SandboxStatus.IDLE: {SandboxStatus.BUSY, SandboxStatus.RUNNING, *_ENDS},
    SandboxStatus.BUSY: {SandboxStatus.IDLE, SandboxStatus.RUNNING, *_ENDS},
    SandboxStatus.STOPPING: {SandboxStatus.STOPPED, SandboxStatus.ERROR},
    SandboxStatus.STOPPED: {SandboxStatus.INITIALIZING, SandboxStatus.ERROR},
    SandboxStatus.ERROR: {SandboxStatus.STOPPING, SandboxStatus.STOPPED, SandboxStatus.INITIALIZING},
}


class ExecutionStatus(StrEnum):
    """How a tool or a command ended."""

    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    """The timeout ended it. A program that ends itself with exit code 124 is an error."""
    CANCELLED = "cancelled"


class SandboxManagerType(StrEnum):
    """Where sandboxes are managed."""

    LOCAL = "local"
    HTTP = "http"


class _Config(BaseModel):
    """A configuration. An invalid or unknown field raises an `InvalidConfig` that names the field."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidConfig(first_problem(error, type(self))) from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise InvalidConfig(first_problem(error, type(self))) from None


class ResourceLimits(_Config):
    """What a sandbox may use besides memory and CPUs."""

    processes: int = Field(default=128, ge=4, le=4096)
    disk_mib: int = Field(default=256, ge=1, le=1 << 16)
    """Size of all files in the working folder together. They are in memory and count towards the memory limit."""
    output_bytes: int = Field(default=16 << 20, ge=0, le=64 << 20)
    """Bytes of each output stream of a command."""


class SandboxConfig(_Config):
    """The configuration that all types of sandboxes share."""

    timeout: float = Field(default=30, gt=0, le=86_400)
    """Seconds, for commands and tools that are called without a timeout."""
    tools_config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Name of a tool → its options. A list of names is accepted, too."""
    working_dir: str = HOME
    env_vars: dict[str, str] = Field(default_factory=dict)
    resource_limits: ResourceLimits = Field(default_factory=ResourceLimits)
    memory_limit: str = "512m"
    """Memory in the notation of Docker: `512m`, `1g`."""
    cpu_limit: float = Field(default=1.0, gt=0, le=256)

    @field_validator("tools_config", mode="before")
    @classmethod
    def _names(cls, tools: Any) -> Any:
        return {name: {} for name in tools} if isinstance(tools, list | tuple) else tools

    @field_validator("working_dir")
    @classmethod
    def _folder(cls, path: str) -> str:
        if not re.fullmatch(r"(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+", path) or path.split("/")[1] in _SYSTEM:
            raise ValueError(f"{path!r} must be an absolute path that is not a system folder")
        return path

    @field_validator("env_vars")
    @classmethod
    def _variables(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"{name!r} is not a valid environment variable")
        return variables

    @field_validator("memory_limit")
    @classmethod
    def _memory(cls, text: str) -> str:
        if not re.fullmatch(r"\d+[kmgKMG]?", text) or not 16 << 20 <= _bytes(text) <= 1 << 40:
            raise ValueError(f"{text!r} is not an amount of memory between 16m and 1024g")
        return text

    @property
    def memory_mib(self) -> int:
        """The memory limit in MiB."""
        return _bytes(self.memory_limit) >> 20


_SYSTEM = (
    "bin", "boot", "box", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr", "var",
)  # fmt: skip


_Words = Annotated[str | list[str] | None, must_be("text or a list of strings")]


class DockerSandboxConfig(SandboxConfig):
    """The configuration of a Docker sandbox. Options that would weaken its isolation are rejected, not ignored."""

    image: str | None = None
    """The name of any local image with Python; `None` means the image of the settings that suits the tools."""
    volumes: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Folders of the host, as `{path: {"bind": folder, "mode": "ro" or "rw"}}`. They are copied into the sandbox when
    it starts and, with `rw`, copied back when it stops. Nothing is ever mounted."""
    network_enabled: bool = False
    network: str | None = None
    ports: dict[str, Any] = Field(default_factory=dict)
    extra_hosts: dict[str, str] = Field(default_factory=dict)
    privileged: bool = False
    entrypoint: _Words = None
    command: _Words = None
    platform: str | None = None
    remove_on_exit: bool = True
    pull_progress: bool = False
    pull_progress_interval: float = 3.0
    docker_executor_workers: int = 8

    @model_validator(mode="after")
    def _closed(self) -> "DockerSandboxConfig":
        refused = {
            "network_enabled": (self.network_enabled, "a sandbox has no network"),
            "network": (self.network not in (None, "none"), "a sandbox has no network"),
            "ports": (self.ports, "a sandbox has no network"),
            "extra_hosts": (self.extra_hosts, "a sandbox has no network"),
            "privileged": (self.privileged, "a sandbox has no privileges"),
            "entrypoint": (self.entrypoint, "process 1 of a sandbox is evalpool's agent"),
            "command": (self.command, "process 1 of a sandbox is evalpool's agent"),
            "remove_on_exit": (not self.remove_on_exit, "a sandbox is always removed when its owner ends"),
        }
        for name, (asked, why) in refused.items():
            if asked:
                raise ValueError(f"{name}: {why}")
        for path, mount in self.volumes.items():
            bind, mode = mount.get("bind", ""), mount.get("mode", "rw")
            if not f"{bind}/".startswith(f"{self.working_dir}/") or ".." in bind.split("/") or mode not in ("ro", "rw"):
                raise ValueError(
                    f"volumes: {path}: 'bind' must be a folder in {self.working_dir}, and 'mode' must be ro or rw"
                )
        return self


class DockerNotebookConfig(DockerSandboxConfig):
    """The configuration of a Docker sandbox for notebooks. There is no server in it, so that no port is needed."""

    host: str | None = None
    port: int | None = None
    token: str | None = None


class SandboxManagerConfig(_Config):
    """The configuration of a manager of sandboxes."""

    base_url: str | None = None
    timeout: float | None = Field(default=None, gt=0)
    api_key: str | None = None
    cleanup_interval: float | None = Field(default=None, gt=0)
    """Seconds between two checks for sandboxes that have died."""
    pool_size: int = Field(default=0, ge=0)
    sandbox_config: dict[str, Any] | None = None


class CommandResult(BaseModel):
    """The result of a command."""

    command: str | list[str]
    status: ExecutionStatus
    exit_code: int
    """The exit code; 124 if the timeout ended the command, and 128 plus the signal if a signal did."""
    stdout: str = ""
    stderr: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """What the command used, and details about how it ended."""


class ToolResult(BaseModel):
    """The result of a tool."""

    model_config = ConfigDict(extra="forbid")

    status: ExecutionStatus
    execution_time: float | None = None
    timestamp: datetime = Field(default_factory=datetime.now)
    tool_name: str
    output: Any = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None
    """What went wrong, and what was written to standard error. Never empty if the tool failed."""

    @property
    def success(self) -> bool:
        """Whether the tool succeeded."""
        return self.status is ExecutionStatus.SUCCESS


class SandboxInfo(BaseModel):
    """A snapshot of a sandbox."""

    id: str
    status: SandboxStatus
    type: str
    config: dict[str, Any]
    created_at: datetime
    updated_at: datetime
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Details about the sandbox. `usage` has its CPU seconds, bytes of memory and processes."""
    available_tools: dict[str, Any] = Field(default_factory=dict)


def _bytes(text: str) -> int:
    unit = {"k": 10, "m": 20, "g": 30}.get(text[-1].lower(), 0)
    return int(text.rstrip("kmgKMG")) << unit
