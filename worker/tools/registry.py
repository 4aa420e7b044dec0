"""The tools by name."""

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel

from schemas.job import ALIASES
from worker.tools.base import JobTool, Tool, ToolOptions

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


NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _is(found: Any, kind: type) -> bool:
    return isinstance(found, type) and issubclass(found, kind)


class ToolFactory:
    """Makes tools for sandboxes, each with its own options and state."""

    @staticmethod
    def register_tool(name: str, tool: type[Tool]) -> None:
        """Make it known; whatever is wrong with the class is said here, and not at its first use."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"register_tool: {name!r} is no name for a tool: letters, digits, _ and -, 64 at most")
        if not isinstance(tool, type) or not issubclass(tool, Tool):
            raise TypeError(f"register_tool({name!r}): {tool!r} is no subclass of Tool")
        wrong = {
            "Parameters: it must be a class of pydantic's BaseModel": not _is(tool.Parameters, BaseModel),
            "Options: it must be a class of ToolOptions": not _is(tool.Options, ToolOptions),
            "execute: it must be a coroutine (async def)": not inspect.iscoroutinefunction(tool.execute),
            "its docstring is missing, which tells models what it is for": not tool.__doc__,
        }
        for what, is_so in wrong.items():
            if is_so:
                raise TypeError(f"register_tool({name!r}): {tool.__name__}: {what}")
        tool.name = name
        _classes[name] = tool
        if issubclass(tool, JobTool):
            TOOLS[name] = tool()

    @staticmethod
    def create_tool(name: str, **options: Any) -> Tool:
        """A tool of its own for one sandbox."""
        if ALIASES.get(name, name) not in _classes:
            known = ", ".join(ToolFactory.get_available_tools())
            raise ValueError(f"tools_config: there is no tool {name!r}; known: {known}")
        return _classes[ALIASES.get(name, name)](**options)

    @staticmethod
    def get_available_tools() -> list[str]:
        """Their names."""
        return sorted(_classes)
