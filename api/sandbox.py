"""The sandbox as a library: one to hold in your own hands, in your own event loop, without a queue."""

from schemas.errors import SandboxLost, SetupError
from schemas.sandbox import (
    CommandResult,
    DockerNotebookConfig,
    DockerSandboxConfig,
    ExecutionStatus,
    SandboxConfig,
    SandboxInfo,
    SandboxManagerConfig,
    SandboxManagerType,
    SandboxStatus,
    SandboxType,
    ToolResult,
)
from worker.library.docker import DockerSandbox
from worker.library.factory import SandboxFactory, register_sandbox
from worker.library.local import LocalProcessSandbox
from worker.library.manager import LocalSandboxManager, SandboxManagerFactory
from worker.library.sandbox import Sandbox
from worker.tools.base import Tool, ToolOptions, ToolParameters
from worker.tools.registry import ToolFactory, register_tool

__all__ = [
    "CommandResult",
    "DockerNotebookConfig",
    "DockerSandbox",
    "DockerSandboxConfig",
    "ExecutionStatus",
    "LocalProcessSandbox",
    "LocalSandboxManager",
    "Sandbox",
    "SandboxConfig",
    "SandboxFactory",
    "SandboxInfo",
    "SandboxLost",
    "SandboxManagerConfig",
    "SandboxManagerFactory",
    "SandboxManagerType",
    "SandboxStatus",
    "SandboxType",
    "SetupError",
    "Tool",
    "ToolFactory",
    "ToolOptions",
    "ToolParameters",
    "ToolResult",
    "register_sandbox",
    "register_tool",
]
