"""The tools by name."""

from collections.abc import Callable
from typing import Any, TypeVar

from schemas.job import ALIASES
from worker.tools.base import JobTool, Tool

T = TypeVar("T", bound=type[Tool])

_classes: dict[str, type[Tool]] = {}
TOOLS: dict[str, JobTool] = {}
"""Those that a job can name, ready for use."""


def register_tool(name: str) -> Callable[[T], T]:
    """Make a class known as the tool of this name; a later one takes the place of an earlier one."""

    def register(tool: T) -> T:
        ToolFactory.register_tool(name, tool)
        return tool

    return register


class ToolFactory:
    """Makes tools for sandboxes, each with its own options and state."""

    @staticmethod
    def register_tool(name: str, tool: type[Tool]) -> None:
        """Make it known."""
        tool.name = name
        _classes[name] = tool
        if issubclass(tool, JobTool):
            TOOLS[name] = tool()

    @staticmethod
    def create_tool(name: str, **options: Any) -> Tool:
        """A tool of its own for one sandbox."""
        if ALIASES.get(name, name) not in _classes:
            raise ValueError(f"unknown tool {name!r}; known: {', '.join(ToolFactory.get_available_tools())}")
        return _classes[ALIASES.get(name, name)](**options)

    @staticmethod
    def get_available_tools() -> list[str]:
        """Their names."""
        return sorted(_classes)
