"""The examples of ms-enclave's own README, with nothing changed but their imports, print what they should.

Its text is read from the installed package, which `make bench` compares us with. In the place of a model answers a
script; what needs an HTTP server is left out.
"""

import importlib.metadata
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT, missing

FRAGMENT = """
import asyncio
from evalpool.api.sandbox import *

config = DockerSandboxConfig(tools_config=["python_executor", "file_operation"])

async def main():
{body}

asyncio.run(main())
"""
MODEL = """
import json
from types import SimpleNamespace as Thing

CALLS = {"python_executor": {"code": "print('hello')"}, "shell_executor": {"command": "ls -d /sandbox"}}


def create(model, messages, tools=(), tool_choice=None):
    offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if not offered:
        text = "".join(json.loads(message["content"])["output"] for message in messages if message["role"] == "tool")
        return Thing(choices=[Thing(message=Thing(content=text))])
    assert all(set(CALLS[name]) <= set(offered[name]["properties"]) for name in CALLS)
    functions = [Thing(name=name, arguments=json.dumps(given)) for name, given in CALLS.items()]
    calls = [Thing(id=function.name, function=function) for function in functions]
    message = Thing(content=None, tool_calls=calls, model_dump=lambda: {"role": "assistant", "content": None})
    return Thing(choices=[Thing(message=message)])


def OpenAI(**_):
    return Thing(chat=Thing(completions=Thing(create=create)))
"""
"""A model that calls the tool it is offered, and then repeats the result."""
HELD = """async with SandboxFactory.create_sandbox(SandboxType.DOCKER, config) as sandbox:
"""


@pytest.fixture(scope="module")
def examples() -> list[str]:
    """Return the Python blocks of the README, unchanged."""
    try:
        readme = str(importlib.metadata.metadata("ms-enclave").get_payload() or "")
    except importlib.metadata.PackageNotFoundError:
        readme = ""
        missing("ms-enclave is not installed (deploy/setup bench)")
    return re.findall(r"^```+python\n(.*?)^```+$", readme, re.MULTILINE | re.DOTALL)


def example(examples: list[str], *words: str) -> str:
    """Return the only block with all of these words, with our imports."""
    found = [text for text in examples if all(word in text for word in words)]
    assert len(found) == 1, (words, len(found))
    text = re.sub(r"from ms_enclave\.sandbox\.\w+ import", "from api.sandbox import", found[0])
    assert "ms_enclave" not in text
    return text


def run(text: str, folder: Path) -> str:
    script = folder / "example.py"
    script.write_text(text)
    env = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("hi from enclave",), r"Hello from sandbox!\nhi from enclave\n\n"),
        (("platform.python_version",), r"3\.11\.\d+\n\n"),
        (("LocalSandboxManager", "echo hello"), r"hello\n\['[2-9a-z]{8}'\]\n"),
        (
            ("LocalSandboxManager", "initialize_pool"),
            r"\['task 0', 'task 1', 'task 2', 'task 3', 'task 4'\]\npool_size = 2\n",
        ),
        (("SandboxManagerType.LOCAL",), r""),
        (("get_registered_types",), r"\['local'\]\n"),
    ],
    ids=["quick start", "factory", "manager", "pool", "explicit manager", "manager types"],
)
def test_the_example_prints_what_its_text_says(
    examples: list[str], engine_client: object, tmp_path: Path, words: tuple[str, ...], printed: str
) -> None:
    assert re.fullmatch(printed, run(example(examples, *words), tmp_path))


def test_a_model_can_call_the_tools(examples: list[str], engine_client: object, tmp_path: Path) -> None:
    (tmp_path / "openai.py").write_text(MODEL)
    assert run(example(examples, "OpenAI"), tmp_path) == "hello\n/sandbox\n\n"


def test_code_fragments_of_the_documents_work(examples: list[str], engine_client: object, tmp_path: Path) -> None:
    error = HELD + textwrap.indent(example(examples, "1/0", "Error message"), "    ")
    said = run(FRAGMENT.format(body=textwrap.indent(error, "    ")), tmp_path)
    assert said.startswith("Error message: Traceback")
    assert "ZeroDivisionError" in said
    needs = example(examples, "requirements_file")
    said = run(FRAGMENT.format(body=textwrap.indent(needs, "    ")), tmp_path)
    assert "Hello from sandbox!\nnumpy\npandas\nmodelscope\n" in said  # there is no network to install from
    volumes = example(examples, "volumes=", "hello.txt")
    said = run(FRAGMENT.format(body=textwrap.indent(volumes, "    ")), tmp_path)
    assert "'output': 'File written successfully: /sandbox/data/hello.txt'" in said
    assert (tmp_path / "Code/ms-enclave/output/hello.txt").read_text() == "Hello, Sandbox!"


def test_configurations_of_the_documents_are_accepted(examples: list[str], tmp_path: Path) -> None:
    configurations = example(examples, "DockerNotebookConfig(")
    assert run("from api.sandbox import *\n" + configurations, tmp_path) == ""
