"""The sandbox as a library: sandboxes in the caller's own event loop, without a queue."""

from evalpool.api.sandbox.docker import DockerSandbox
from evalpool.api.sandbox.factory import SandboxFactory, register_sandbox
from evalpool.api.sandbox.local import LocalProcessSandbox
from evalpool.api.sandbox.manager import LocalSandboxManager, SandboxManagerFactory
from evalpool.api.sandbox.sandbox import Sandbox
from evalpool.schemas.errors import InvalidCall, InvalidConfig, SandboxLost, SetupError
from evalpool.schemas.sandbox import (
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
from evalpool.worker.tools.base import Tool, ToolOptions, ToolParameters
from evalpool.worker.tools.registry import ToolFactory, register_tool

__all__ = [
    "CommandResult",
    "DockerNotebookConfig",
    "DockerSandbox",
    "DockerSandboxConfig",
    "ExecutionStatus",
    "InvalidCall",
    "InvalidConfig",
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
