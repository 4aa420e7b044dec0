"""The tools by name, and what models are told about them."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCHEMAS = (
    "import json\n"
    "from evalpool.sandbox import ToolFactory\n"
    "print(json.dumps([ToolFactory.create_tool(name).schema for name in ToolFactory.get_available_tools()]))"
)


def schemas(*options: str) -> list[dict[str, dict[str, str]]]:
    """Return the schemas of all tools in an interpreter with these options."""
    command = [sys.executable, *options, "-c", SCHEMAS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, dict[str, str]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("option", ["-O", "-OO"])
def test_an_optimising_interpreter_has_the_same_tools_with_the_same_descriptions(option: str) -> None:
    usual = schemas()
    assert all(schema["function"]["description"] for schema in usual)
    assert schemas(option) == usual


def test_a_tool_without_descriptions_can_be_registered_where_python_removes_docstrings() -> None:
    code = (
        "from evalpool.sandbox import Tool, register_tool\n"
        "@register_tool('mine')\n"
        "class Mine(Tool):\n"
        "    '''Do it.'''\n"
        "    async def execute(self, sandbox_context): return 'done'\n"
        "print(repr(Mine().description))"
    )
    for options, description in (((), "'Do it.'"), (("-OO",), "''")):
        command = [sys.executable, *options, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.strip()) == (0, description), done.stderr
