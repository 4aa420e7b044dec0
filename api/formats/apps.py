"""APPS and its kin (TACO, PRIME, verl): tests in `input_output`, the candidates beside it or in a file of their own."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import count as numbers
from pathlib import Path
from typing import Any

from api.formats.calls import arguments, checked, decoded, judged
from api.formats.lines import Lines
from api.formats.rows import Row
from api.formats.samples import Sample, at, candidates, few, numbered
from api.formats.shelf import Problems
from schemas.errors import InvalidJob
from schemas.job import Case, JobSpec
from schemas.limits import Limits
from schemas.report import Report
from schemas.result import Result

TITLE = "APPS samples"
LIMITS: dict[str, float] = {"cpu_seconds": 4, "wall_seconds": 8}
IDS = ("task_id", "problem_id", "question_id", "id")
SINGLE = ("completion", "generation", "code", "solution")
SEVERAL = ("completions", "generations", "code_list")


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Whether there are tests of this kind."""
    return "input_output" in (sample if problem is None else problem)


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """One job for each candidate."""
    known = Problems(problems, _identified) if problems else None
    return judged(_samples(samples, known), known, _tests, limits)


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """The first of the solutions of each problem that has some; not every problem of APPS has."""
    if problems is None:
        raise InvalidJob("the problems with their solutions are needed: --problems FILE")
    rows = ((row, _solutions(row)) for row in problems)
    samples = (Sample(row, _identified(row), row.fields, found[0]) for row, found in rows if found)
    return judged(samples, None, _tests, limits)


def count(samples: Lines, problems: Lines | None) -> int | None:
    """How many problems there are; not known if the samples bring their own."""
    return None if problems is None else sum(1 for _ in problems)


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> None:
    """Nothing: these have no result file of their own."""


def _samples(samples: Lines, known: Problems | None) -> Iterator[Sample]:
    number = numbers()

    def problem(row: Row) -> tuple[str | int, Mapping[str, Any]]:
        place = next(number)
        if known is not None:
            task = _identified(row)
            return task, known.of(row, task, "problem")
        return _identified(row) if any(name in row.fields for name in IDS) else place, row.fields

    return numbered(samples, problem, lambda row: candidates(row, SINGLE, SEVERAL))


def _identified(row: Row) -> str:
    task = next((row.fields[name] for name in IDS if name in row.fields), None)
    if not isinstance(task, str | int):
        raise InvalidJob(f"{row.place}: one of {', '.join(IDS)} must be a string or a number")
    return str(task)


def _solutions(row: Row) -> list[str]:
    """APPS has the list as JSON in a string, which is empty where there are none."""
    with at(row.place):
        found = decoded(row.fields.get("solutions") or [], "solutions")
    return candidates(Row({"solutions": found}, row.place), (), ("solutions",))


def _tests(problem: Mapping[str, Any]) -> dict[str, Any]:
    given = decoded(problem.get("input_output"), "input_output")
    if not isinstance(given, dict):
        raise InvalidJob('"input_output" must be an object')
    inputs, outputs, asserts = (given.get(name) or [] for name in ("inputs", "outputs", "assert_case"))
    if not all(isinstance(each, list) for each in (inputs, outputs, asserts)):
        raise InvalidJob('"input_output" has inputs, outputs or assert_case that are not lists')
    few(inputs, '"input_output"')
    asserts = [str(each) for each in asserts if each]
    if asserts and not any(inputs) and not any(outputs):
        return {"check": "\n".join(asserts)}
    if asserts or not inputs or len(inputs) != len(outputs):
        found = f"{len(inputs)} inputs, {len(outputs)} outputs and {len(asserts)} asserts"
        raise InvalidJob(f'"input_output" has {found}; an output for each input is needed, or asserts alone')
    name = given.get("fn_name")
    if name is None:
        pairs = zip(map(_text, inputs), map(_text, outputs), strict=True)
        return {"cases": [Case(one, other, comparator="tokens") for one, other in pairs]}
    calls = (_call(one, other) for one, other in zip(inputs, outputs, strict=True))
    return {"cases": [Case(one, other, comparator="json:unwrap") for one, other in calls], "entry_point": name}


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(given: Any, expected: Any) -> tuple[str, str]:
    """APPS has a list of arguments and a value; verl has them as text, one JSON value on each line."""
    if isinstance(given, str):
        return arguments(given), checked(expected) if isinstance(expected, str) else json.dumps(expected)
    if not isinstance(given, list):
        raise InvalidJob('"inputs" of a function must be lists of arguments')
    return json.dumps(given), json.dumps(expected)
