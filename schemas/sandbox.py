"""A sandbox as a library sees it: what is asked for, in which state it is, and what comes back."""

import re
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

HOME = "/sandbox"
LONGEST_SECONDS = 30 * 86_400
"""That a command may be given."""


class SandboxType(StrEnum):
    """The types that come with evalpool; others can be registered under any name."""

    DOCKER = "docker"
    DOCKER_NOTEBOOK = "docker_notebook"
    """The same, with an image that has what notebooks like to use."""
    LOCAL_PROCESS = "local_process"
    """For machines without Docker: bubblewrap where there is one, and no walls at all where not."""
    DUMMY = "dummy"
    """Without walls, for tests."""


class SandboxStatus(StrEnum):
    """Where a sandbox is in its life."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    IDLE = "idle"
    """In a pool, waiting."""
    BUSY = "busy"
    """In a pool, lent."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    ERROR = "error"
    """Broken; `metadata["error"]` says why."""

    @property
    def active(self) -> bool:
        """Whether tools can be executed."""
        return self in (SandboxStatus.RUNNING, SandboxStatus.IDLE, SandboxStatus.BUSY)

    def may_become(self, other: "SandboxStatus") -> bool:
        """Whether that is a possible move."""
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
    """Our limit ended it; a program that ends itself with code 124 is an error."""
    CANCELLED = "cancelled"


class SandboxManagerType(StrEnum):
    """Where sandboxes are managed."""

    LOCAL = "local"
    HTTP = "http"


class _Config(BaseModel):
    """Refuses what it does not know, by name."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class ResourceLimits(_Config):
    """What a sandbox may use beside memory and CPUs."""

    processes: int = Field(default=128, ge=4, le=4096)
    disk_mib: int = Field(default=256, ge=1, le=1 << 16)
    """All files in the working folder together; they lie in memory and count as such."""
    output_bytes: int = Field(default=16 << 20, ge=0, le=64 << 20)
    """Of each stream of a command."""


class SandboxConfig(_Config):
    """What every type of sandbox is asked for."""

    timeout: float = Field(default=30, gt=0, le=86_400)
    """Seconds, for what names no timeout of its own."""
    tools_config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """The tools it shall have, each with its options; a list of names will do."""
    working_dir: str = HOME
    env_vars: dict[str, str] = Field(default_factory=dict)
    resource_limits: ResourceLimits = Field(default_factory=ResourceLimits)
    memory_limit: str = "512m"
    """As Docker writes it: `512m`, `1g`."""
    cpu_limit: float = Field(default=1.0, gt=0, le=256)

    @field_validator("tools_config", mode="before")
    @classmethod
    def _names(cls, tools: Any) -> Any:
        return {name: {} for name in tools} if isinstance(tools, list | tuple) else tools

    @field_validator("working_dir")
    @classmethod
    def _folder(cls, path: str) -> str:
        if not re.fullmatch(r"(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+", path) or path.split("/")[1] in _SYSTEM:
            raise ValueError(f"{path!r} must be an absolute path that is not the system's own")
        return path

    @field_validator("env_vars")
    @classmethod
    def _variables(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"{name!r} cannot be a variable of a process")
        return variables

    @field_validator("memory_limit")
    @classmethod
    def _memory(cls, text: str) -> str:
        if not re.fullmatch(r"\d+[kmgKMG]?", text) or not 16 << 20 <= _bytes(text) <= 1 << 40:
            raise ValueError(f"{text!r} is no amount of memory between 16m and 1024g")
        return text

    @property
    def memory_mib(self) -> int:
        """The memory limit as a number."""
        return _bytes(self.memory_limit) >> 20


_SYSTEM = (
    "bin", "boot", "box", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr", "var",
)  # fmt: skip


class DockerSandboxConfig(SandboxConfig):
    """Of a container. What would open its walls is refused, not ignored."""

    image: str | None = None
    """Any local image with a Python; without one, that of the settings which suits the tools."""
    volumes: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Folders of the host, `{path: {"bind": folder, "mode": "ro" or "rw"}}`: copied in at the start and, with `rw`,
    back at the stop. Nothing is ever mounted."""
    network_enabled: bool = False
    network: str | None = None
    ports: dict[str, Any] = Field(default_factory=dict)
    extra_hosts: dict[str, str] = Field(default_factory=dict)
    privileged: bool = False
    entrypoint: str | list[str] | None = None
    command: str | list[str] | None = None
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
            "remove_on_exit": (not self.remove_on_exit, "a sandbox ends with its owner"),
        }
        for name, (asked, why) in refused.items():
            if asked:
                raise ValueError(f"{name}: {why}")
        for path, mount in self.volumes.items():
            bind, mode = mount.get("bind", ""), mount.get("mode", "rw")
            if not f"{bind}/".startswith(f"{self.working_dir}/") or ".." in bind.split("/") or mode not in ("ro", "rw"):
                raise ValueError(f"volumes: {path}: 'bind' must be a folder in {self.working_dir}, 'mode' ro or rw")
        return self


class DockerNotebookConfig(DockerSandboxConfig):
    """Of a container for notebooks. There is no server in it, so that it needs no port."""

    host: str | None = None
    port: int | None = None
    token: str | None = None


class SandboxManagerConfig(_Config):
    """Of a manager."""

    base_url: str | None = None
    timeout: float | None = Field(default=None, gt=0)
    api_key: str | None = None
    cleanup_interval: float | None = Field(default=None, gt=0)
    """Seconds between looks for sandboxes that have died."""
    pool_size: int = Field(default=0, ge=0)
    sandbox_config: dict[str, Any] | None = None


class CommandResult(BaseModel):
    """What a command did."""

    command: str | list[str]
    status: ExecutionStatus
    exit_code: int
    """124 where our timeout ended it, 128 and the signal where a signal did."""
    stdout: str = ""
    stderr: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """What it used, and what else is to be said of its end."""


class ToolResult(BaseModel):
    """What a tool did."""

    model_config = ConfigDict(extra="forbid")

    status: ExecutionStatus
    execution_time: float | None = None
    timestamp: datetime = Field(default_factory=datetime.now)
    tool_name: str
    output: Any = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None
    """What went wrong, always with words where it did; and what was written to standard error."""

    @property
    def success(self) -> bool:
        """Whether it went well."""
        return self.status is ExecutionStatus.SUCCESS


class SandboxInfo(BaseModel):
    """A sandbox at one moment."""

    id: str
    status: SandboxStatus
    type: str
    config: dict[str, Any]
    created_at: datetime
    updated_at: datetime
    metadata: dict[str, Any] = Field(default_factory=dict)
    """With `usage`: CPU seconds, bytes of memory and processes, as of now."""
    available_tools: dict[str, Any] = Field(default_factory=dict)


def _bytes(text: str) -> int:
    unit = {"k": 10, "m": 20, "g": 30}.get(text[-1].lower(), 0)
    return int(text.rstrip("kmgKMG")) << unit
