"""APPS, TACO, PRIME and verl: tests are in `input_output`, candidates in the same row or in a file of their own."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import count as numbers
from pathlib import Path
from typing import Any

from evalpool.api.formats.calls import arguments, checked, decoded, judged
from evalpool.api.formats.lines import Lines
from evalpool.api.formats.rows import Row
from evalpool.api.formats.samples import Problem, Sample, at, candidates, few, numbered
from evalpool.api.formats.shelf import Problems
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.job import Case, JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result

TITLE = "APPS samples"
LIMITS: dict[str, float] = {"cpu_seconds": 4, "wall_seconds": 8}
IDS = ("task_id", "problem_id", "question_id", "id")
SINGLE = ("completion", "generation", "code", "solution")
SEVERAL = ("completions", "generations", "code_list")


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Return whether the rows have tests in `input_output`."""
    return "input_output" in (sample if problem is None else problem)


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield one job for each candidate."""
    known = Problems(problems, _identified) if problems else None
    return judged(_samples(samples, known), known, _tests, limits)


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield the first solution of each problem. Some problems of APPS have none."""
    if problems is None:
        raise InvalidJob("the reference solutions are in the file of problems, which is missing: --problems FILE")
    rows = ((row, _solutions(row)) for row in problems)
    samples = (Sample(row, _identified(row), row.fields, found[0]) for row, found in rows if found)
    return judged(samples, None, _tests, limits)


def count(samples: Lines, problems: Lines | None) -> int | None:
    """Return the number of problems, which is not known if the samples contain their own."""
    return None if problems is None else sum(1 for _ in problems)


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> None:
    """Write nothing, since these harnesses have no result file."""


def _samples(samples: Lines, known: Problems | None) -> Iterator[Sample]:
    number = numbers()

    def problem(row: Row) -> Problem:
        place = next(number)
        if known is not None:
            task = _identified(row)
            return Problem(task, known.of(row, task, "problem"))
        return Problem(_identified(row) if any(name in row.fields for name in IDS) else place, row.fields)

    return numbered(samples, problem, lambda row: candidates(row, SINGLE, SEVERAL))


def _identified(row: Row) -> str:
    task = next((row.fields[name] for name in IDS if name in row.fields), None)
    if not isinstance(task, str | int):
        raise InvalidJob(f"{row.place}: one of {', '.join(IDS)} must be a string or a number")
    return str(task)


def _solutions(row: Row) -> list[str]:
    """Return the solutions of a problem. APPS has the list as JSON in a string, which may be empty."""
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
        raise InvalidJob(f'"input_output" has {found}; it must have one output for each input, or only asserts')
    name = given.get("fn_name")
    if name is None:
        pairs = zip(map(_text, inputs), map(_text, outputs), strict=True)
        return {"cases": [Case(one, other, comparator="tokens") for one, other in pairs]}
    return {"cases": [_call(one, other) for one, other in zip(inputs, outputs, strict=True)], "entry_point": name}


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(given: Any, expected: Any) -> Case:
    """Return the case of one call. APPS has a list of arguments and a value; verl has text, with one JSON value on each
    line."""
    if isinstance(given, str):
        stdin, value = arguments(given), checked(expected) if isinstance(expected, str) else json.dumps(expected)
    elif isinstance(given, list):
        stdin, value = json.dumps(given), json.dumps(expected)
    else:
        raise InvalidJob('"inputs" of a function must be lists of arguments')
    return Case(stdin, value, comparator="json:unwrap")
