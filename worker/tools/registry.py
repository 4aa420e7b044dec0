"""The registry of all tools, by name."""

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel

from evalpool.schemas.errors import InvalidCall, InvalidConfig
from evalpool.schemas.job import ALIASES
from evalpool.worker.tools.base import JobTool, Tool, ToolOptions

T = TypeVar("T", bound=type[Tool])

_classes: dict[str, type[Tool]] = {}
TOOLS: dict[str, JobTool] = {}
"""The tools that a job can name, ready for use."""


def register_tool(name: str) -> Callable[[T], T]:
    """Register a class as the tool of this name. A later class replaces an earlier one."""

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
        """Register a class. Raises `InvalidCall` or `TypeError` if the name or the class is not valid."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidCall(
                f"register_tool: {name!r} is not a valid name for a tool; it must have 1 to 64 letters, digits, _ or -"
            )
        if not isinstance(tool, type) or not issubclass(tool, Tool):
            raise TypeError(f"register_tool({name!r}): {tool!r} is not a subclass of Tool")
        wrong = {
            "Parameters must be a subclass of pydantic's BaseModel": not _is(tool.Parameters, BaseModel),
            "Options must be a subclass of ToolOptions": not _is(tool.Options, ToolOptions),
            "execute must be a coroutine (async def)": not inspect.iscoroutinefunction(tool.execute),
            "the docstring, which tells models what the tool is for, is missing": not (
                tool.__doc__ or tool.description or sys.flags.optimize > 1
            ),
        }
        for what, is_so in wrong.items():
            if is_so:
                raise TypeError(f"register_tool({name!r}): {tool.__name__}: {what}")
        if "description" not in vars(tool) and tool.__doc__:
            tool.description = " ".join(tool.__doc__.split())
        tool.name = name
        _classes[name] = tool
        if issubclass(tool, JobTool):
            TOOLS[name] = tool()

    @staticmethod
    def create_tool(name: str, **options: Any) -> Tool:
        """Make a tool for one sandbox. Raises `InvalidConfig` if the name is not known."""
        if ALIASES.get(name, name) not in _classes:
            known = ", ".join(ToolFactory.get_available_tools())
            raise InvalidConfig(f"tools_config: there is no tool {name!r}; known: {known}")
        return _classes[ALIASES.get(name, name)](**options)

    @staticmethod
    def get_available_tools() -> list[str]:
        """Return the names of all tools."""
        return sorted(_classes)
