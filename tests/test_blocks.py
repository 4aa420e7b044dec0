"""Every code block of the README and of docs/ does what it says.

Python blocks are run, and so are shell blocks that need no installation, no fleet and no second terminal. A text block
right after such a block is its output, where `…` stands for anything. All other shell blocks, and commands within
sentences, are checked against the real command line and the real Makefile.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import docker
import pytest
import typer
import yaml

from evalpool.api import formats
from evalpool.api.cli import app
from evalpool.schemas import Settings
from evalpool.schemas.settings import ENV_FILE
from tests.conftest import ROOT, WorkerProcess, containers, eventually

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "sh", "text", "jsonl", "dockerfile"}
NOT_RUN = ("make ", "docker ", "celery ", "evalpool worker", "images build", "export EVALPOOL_")
"""Words of shell blocks that are only checked: they install something, need a fleet, or stay in the foreground."""
PATIENCE = 300.0
"""Seconds that all blocks of one document may take on a busy machine."""
DRIVER = """
import contextlib, io, json, subprocess, sys
names, outputs = {"__name__": "__main__"}, []
for language, text in json.load(sys.stdin):
    if language == "python":
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(compile(text, "block", "exec"), names)
        outputs.append(stdout.getvalue())
    else:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0, f"exit code {done.returncode}: {text}{done.stdout}"
        outputs.append(done.stdout)
json.dump(outputs, sys.stdout)
"""


class Block(NamedTuple):
    """A fenced block of a document."""

    language: str
    text: str
    output: str | None
    """The text block right after it, if there is one."""

    @property
    def runs(self) -> bool:
        """Whether a test runs this block."""
        return self.language == "python" or (self.language == "sh" and not any(word in self.text for word in NOT_RUN))


def blocks(document: Path) -> list[Block]:
    """The blocks of a document, each with its output."""
    text = document.read_text()
    found = list(FENCE.finditer(text))
    made = []
    for fence, after in zip_longest(found, found[1:]):
        between = text[fence.end() : after.start()].strip() if after else "?"
        follows = after is not None and after[2] == "text" and (not between or re.fullmatch(r"[^\n#].*:", between))
        made.append(Block(fence[2], dedented(fence), dedented(after) if after and follows else None))
    return made


def dedented(fence: re.Match[str]) -> str:
    """The text of a block that may be part of a list."""
    return re.sub(f"^{fence[1]}", "", fence[3], flags=re.MULTILINE)


def documents_with(language: str) -> list[Path]:
    """The documents that have a block in this language."""
    return [document for document in DOCUMENTS if any(block.language == language for block in blocks(document))]


def name(document: Path) -> str:
    """A document's name in the list of tests."""
    return str(document.relative_to(ROOT))


# -- blocks that are run -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(
    redis_server: str, engine_client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The environment of a reader who has a worker running."""
    folder = tmp_path_factory.mktemp("service")
    env = {
        "EVALPOOL_REDIS_URL": redis_server,
        "EVALPOOL_DATABASE_URL": f"sqlite:///{folder / 'ledger.db'}",
        "EVALPOOL_STATE_DIR": str(folder / "state"),
    }
    worker = WorkerProcess(folder / "worker.log", **env).wait_ready()
    yield env
    worker.stop()
    eventually(lambda: not containers(engine_client, worker.pid))


@pytest.mark.docker
@pytest.mark.redis
@pytest.mark.parametrize("document", [each for each in DOCUMENTS if any(b.runs for b in blocks(each))], ids=name)
def test_the_blocks_of_a_document_run_and_print_what_it_says(
    document: Path, service: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run = [block for block in blocks(document) if block.runs]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=tmp_path,
        env=os.environ | service | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        input=json.dumps([(block.language, patient(block.text)) for block in run]),
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0
    for block, printed in zip(run, json.loads(done.stdout), strict=True):
        if block.output is not None:
            in_any_order = "as_completed" in block.text
            assert agrees(block.output, printed, in_any_order=in_any_order), f"{block.text}\nprinted:\n{printed}"


def patient(text: str) -> str:
    """The same text with longer timeouts: a reader's patience is not a measure of speed."""
    return re.sub(r"(?<=\btimeout=)(60|120)(?=\))", f"{PATIENCE:g}", text)


def agrees(shown: str, printed: str, *, in_any_order: bool = False) -> bool:
    """Whether an output is the one that a document shows. Times differ from run to run and are not compared."""
    expected, lines = shown.splitlines(), printed.splitlines()
    if in_any_order:
        expected, lines = sorted(expected), sorted(lines)
    pattern = ""
    for line in expected:
        literal = re.sub(r"\d+\\\.\d+\\ s\b", r"[\\d.]+\\ s", re.escape(line))
        pattern += r"(?:.*\n)*?" if line == "…" else literal.replace("…", ".*") + r" *\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "b\na\n", False),
        ("used 5.00 s of CPU\n", "used 5.04 s of CPU\n", True),
        ("a … z\n", "a b c z\n", True),
        ("a\n…\nz\n", "a\nb\nc\nz\n", True),
        ("a\n…\nz\n", "a\nb\nc\n", False),
        ("a\n", "a\nb\n", False),
    ],
)
def test_an_output_agrees_only_with_what_is_shown(shown: str, printed: str, same: bool) -> None:
    assert agrees(shown, printed) is same


def test_most_blocks_are_run() -> None:
    run = [block for document in DOCUMENTS for block in blocks(document) if block.runs]
    assert len([block for block in run if block.language == "python"]) >= 10
    assert len([block for block in run if block.language == "sh"]) >= 6
    assert len([block for block in run if block.output is not None]) >= 10


# -- blocks and commands that are only checked -------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_block_is_in_a_language_that_is_tested(document: Path) -> None:
    assert {block.language for block in blocks(document)} <= LANGUAGES


@pytest.mark.parametrize("document", documents_with("sh"), ids=name)
def test_every_shell_block_is_valid_bash(document: Path) -> None:
    for block in blocks(document):
        if block.language == "sh":
            done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, ""), block.text


def commands(document: Path) -> Iterator[list[str]]:
    """The words of every command in a document, be it in a shell block or in a sentence."""
    text = document.read_text()
    lines = [line for block in blocks(document) if block.language == "sh" for line in block.text.splitlines()]
    inline = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    for line in [*lines, *(" ".join(code.split()) for code in inline)]:
        for part in re.split(r"\|\|?|&&|;|\$\(", line.partition(" #")[0].replace('"$batch"', "BATCH")):
            words = (
                shlex.split(part.rstrip(") "), posix=True) if part.count('"') % 2 == part.count("'") % 2 == 0 else []
            )
            while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in ("sudo", "exec", "export")):
                words = words[1:]
            if words:
                yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_evalpool_command_exists_with_its_options(document: Path) -> None:
    for words in commands(document):
        if "evalpool" in words and (words[0] == "evalpool" or words[:3] == ["docker", "compose", "exec"]):
            check_evalpool(words[words.index("evalpool") + 1 :], " ".join(words))


def check_evalpool(words: list[str], whole: str) -> None:
    """Fail unless these are words of the real command line."""
    command: Any = typer.main.get_command(app)
    for word in words:
        if hasattr(command, "commands") and not word.startswith("-"):
            assert word in command.commands, whole
            command = command.commands[word]
        elif word.startswith("--"):
            known = [option for each in command.params for option in (*each.opts, *each.secondary_opts)]
            known.append("--help")  # every command has it
            assert word.partition("=")[0] in known, whole


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_make_target_and_variable_exists(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for words in commands(document):
        if words[0] == "make" and len(words) > 1:
            assert words[1] in targets, words
            for word in words[2:]:
                variable = word.partition("=")[0]
                assert re.search(rf"\$\((or \$\(|if )?{variable}\b", makefile), words


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_celery_and_compose_command_names_what_there_is(document: Path) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for words in commands(document):
        if words[:2] == ["celery", "-A"]:
            assert words[2] in ("worker", "evalpool.worker"), words
            assert words[3:4] == [] or words[3] in ("worker", "inspect", "flower"), words
        if words[:3] == ["docker", "compose", "exec"]:
            assert next(word for word in words[3:] if not word.startswith("-")) in services


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_setting_that_is_named_exists(document: Path) -> None:
    named = set(re.findall(r"\bEVALPOOL_[A-Z_]+\b", document.read_text()))
    known = {f"EVALPOOL_{field.upper()}" for field in Settings.model_fields} | {ENV_FILE}
    assert {each for each in named if not each.endswith("_")} <= known


@pytest.mark.parametrize("document", documents_with("jsonl"), ids=name)
def test_the_tests_in_rows_are_accepted_by_the_native_format(document: Path, tmp_path: Path) -> None:
    for block in blocks(document):
        for line in block.text.splitlines() if block.language == "jsonl" else ():
            row = {"task_id": "double", "code": "def double(x): return 2 * x", "tests": [json.loads(line)]}
            (tmp_path / "jobs.jsonl").write_text(json.dumps(row))
            with formats.read(str(tmp_path / "jobs.jsonl"), "auto") as data:
                (job,) = data.jobs()
            assert job.check or job.cases


@pytest.mark.parametrize("document", documents_with("dockerfile"), ids=name)
def test_every_dockerfile_has_only_instructions(document: Path) -> None:
    for block in blocks(document):
        for line in block.text.splitlines() if block.language == "dockerfile" else ():
            assert line.split()[0] in ("FROM", "RUN", "COPY"), line
