"""The tools by name."""

from worker.tools.base import Tool
from worker.tools.code import MultiCodeExecutor, PythonExecutor, ShellExecutor

TOOLS: dict[str, Tool] = {tool.name: tool for tool in (PythonExecutor(), ShellExecutor(), MultiCodeExecutor())}
