"""The tree of errors is complete, it is drawn as it is, and every error is where a caller looks for it."""

import ast
import builtins
import copy
import pickle
from pathlib import Path

import pytest

import evalpool
from evalpool import schemas
from evalpool.schemas import errors
from evalpool.schemas.errors import EvalpoolError
from tests.conftest import ROOT

OURS = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
ALONE = "worker/sandbox/agent"
"""The agent runs inside the sandbox, where nothing else of ours is."""


def classes(file: Path) -> list[tuple[str, set[str]]]:
    """Every class of a file, with the names of its bases."""
    found = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
    return [(each.name, {ast.unparse(base).rpartition(".")[2] for base in each.bases}) for each in found]


def test_errors_are_defined_in_one_file_only() -> None:
    standard = {name for name, value in vars(builtins).items() if _raisable(value)}
    files = [file for folder in ("schemas", "worker", "api", "evalpool") for file in (ROOT / folder).glob("**/*.py")]
    elsewhere = [file for file in files if file != Path(errors.__file__).resolve() and ALONE not in str(file)]
    assert len(elsewhere) > 100
    found = {(file, name): bases for file in elsewhere for name, bases in classes(file)}
    raised = {
        f"{file.relative_to(ROOT)}: {name}"
        for (file, name), bases in found.items()
        if bases & (standard | OURS.keys()) or any(base.endswith(("Error", "Exception")) for base in bases)
    }
    assert raised == set()


def test_the_drawing_shows_every_error_below_its_base() -> None:
    drawing = [line for line in str(errors.__doc__).splitlines() if line.startswith(("EvalpoolError", "│", "├", "└"))]
    path: list[str] = []
    drawn: dict[str, set[str]] = {}
    for line in drawing:
        name, _, also = line.lstrip("│├└─ ").partition(" ")
        depth = (len(line) - len(line.lstrip("│├└─ "))) // 4
        path[depth:] = [name]
        drawn[name] = {path[depth - 1] if depth else "Exception"} | ({also.strip("()")} if also else set())
    assert drawn == {name: {base.__name__ for base in value.__bases__} for name, value in OURS.items()}


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_error_is_ours_and_says_what_to_do(name: str) -> None:
    assert issubclass(OURS[name], EvalpoolError)
    sentence = " ".join(str(OURS[name].__doc__).split())
    assert sentence.endswith(".")
    assert ": " in sentence or "; " in sentence


def test_the_errors_that_callers_meet_are_exported() -> None:
    of_the_contract = {"InvalidJob", "IdempotencyConflict", "JobNotFound", "BatchNotFound", "QueueUnavailable"}
    assert of_the_contract <= set(evalpool.__all__)
    assert {name: getattr(evalpool, name) for name in of_the_contract} == {name: OURS[name] for name in of_the_contract}
    others = {"EvalpoolError", "DatabaseUnavailable", "SchemaMismatch", "SetupError", "SandboxLost"}
    assert of_the_contract | others <= set(schemas.__all__)
    assert issubclass(errors.InvalidJob, ValueError)


def _raisable(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


MADE = {
    "IdempotencyConflict": ("key", "a-batch", "job 3 differs"),
    "QueueUnavailable": ("a-batch", "Redis is away"),
    "CannotImport": ("numpy", "(ImportError: no)"),
}
"""What these errors are made of; the others take one text."""


@pytest.mark.parametrize("name", OURS)
def test_an_error_is_the_same_after_it_was_pickled_or_copied(name: str) -> None:
    """Process pools pickle the errors of their calls, and break if they cannot be read again."""
    error = OURS[name](*MADE.get(name, ("x",)))
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(same), str(same), vars(same)) == (type(error), str(error), vars(error))


def test_the_library_raises_no_plain_value_error() -> None:
    files = [*(ROOT / "api" / "sandbox").glob("*.py"), ROOT / "worker/tools/base.py", ROOT / "worker/tools/registry.py"]
    internal = {
        "volumes.py"
    }  # which says why an archive from a sandbox is not copied; its caller turns that into a log
    raised = [file.name for file in files if file.name not in internal and "raise ValueError(" in file.read_text()]
    assert raised == []
