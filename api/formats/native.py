"""evalpool's own format: one job per line, with JobSpec's fields or with short names for limits and tests."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evalpool.api.formats.lines import Lines
from evalpool.api.formats.samples import at, few, unfenced
from evalpool.schemas import ceilings
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.job import Case, JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result
from evalpool.schemas.settings import settings

TITLE = "native jobs"
LIMITS: dict[str, float] = {}
SHORT: dict[str, tuple[str, int]] = {
    "cpu_s": ("cpu_seconds", 1),
    "wall_s": ("wall_seconds", 1),
    "memory_mb": ("memory_mib", 1),
    "pids": ("processes", 1),
    "output_kb": ("output_bytes", 1024),
}
"""Short name of a limit → the field of `Limits`, and the factor between their units."""


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Return whether the row has the keys of a job."""
    return "code" in sample


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield one job for each row. A limit of the row overrides the given limits."""
    if problems is not None:
        raise InvalidJob(f"{problems.name}: native rows contain their own checks; --problems is for other formats")
    now = settings()
    for row in samples:
        with at(row.place):
            spec = job(row.fields, limits, samples.extract)
            ceilings.check(spec.limits, now)
        yield spec


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Raise `InvalidJob`, since there are no problems."""
    raise InvalidJob("native rows have no reference solutions")


def count(samples: Lines, problems: Lines | None) -> int | None:
    """Return `None`, since the number of problems is not known."""
    return None


def job(row: Mapping[str, Any], limits: Limits, extract: str = "none") -> JobSpec:
    """Return the job of one row."""
    fields = dict(row)
    if isinstance(fields.get("code"), str):
        fields["code"] = unfenced(fields["code"], extract)
    fields["limits"] = _limits(fields.get("limits", {}), limits)
    _labels(fields)
    if "tests" in fields:
        _tests(fields)
    return JobSpec(**fields)


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> None:
    """Write nothing, since `results.jsonl` is this format's result file."""


def _limits(given: Any, default: Limits) -> Limits:
    _need(isinstance(given, dict), "limits: it must be an object")
    chosen: dict[str, Any] = {}
    for name, value in given.items():
        ours, unit = SHORT.get(name, (name, 1))
        _need(ours not in chosen, f"limits.{name}: the limit is given twice, also as {ours}")
        _need(unit == 1 or type(value) is int, f"limits.{name}: it must be a whole number")
        chosen[ours] = value * unit
    try:
        return Limits(**default.model_dump() | chosen)
    except InvalidJob as error:
        raise InvalidJob(f"limits.{error}") from None


def _labels(fields: dict[str, Any]) -> None:
    """Take `metadata` as another name for labels, and `custom_id` as one of the labels."""
    labels = fields.pop("metadata", None)
    if labels is not None:
        _need("labels" not in fields, "metadata: the row has labels too; use only one of them")
        _need(isinstance(labels, dict), "metadata: it must be an object")
        fields["labels"] = labels
    if "custom_id" in fields:
        _need(isinstance(fields.get("labels") or {}, dict), "labels: it must be an object")
        fields["labels"] = {**(fields.get("labels") or {}), "custom_id": fields.pop("custom_id")}


def _tests(fields: dict[str, Any]) -> None:
    tests = fields.pop("tests")
    _need(isinstance(tests, list) and len(tests) > 0, "tests: it must be a list of at least one test")
    few(tests, "tests")
    _need(not fields.keys() & {"check", "cases"}, "tests: the row has check or cases too; use only one of them")
    checks: list[str] = []
    cases: list[Case] = []
    called: set[str | None] = set()
    for index, test in enumerate(tests):
        place = f"tests.{index}"
        _need(isinstance(test, dict), f"{place}: it must be an object")
        try:
            _test(dict(test), checks, cases, called)
        except InvalidJob as error:
            raise InvalidJob(f"{place}.{error}") from None
        _need(len(called) <= 1, f"{place}: the tests of a job must all be stdio, or all be calls of one function")
    if checks:
        fields["check"] = "\n".join(checks)
    if cases:
        fields["cases"] = cases
    if called - {None}:
        _need("entry_point" not in fields, "entry_point: it must be left out, since the tests name the function")
        (fields["entry_point"],) = called


def _test(test: dict[str, Any], checks: list[str], cases: list[Case], called: set[str | None]) -> None:
    """Add one test to the checks or cases. `called` collects the functions of the cases, and `None` for standard
    input."""
    kind = test.pop("type", None)
    if kind == "assert":
        code = test.pop("code", None)
        _need(isinstance(code, str), "code: it must be a string")
        _need(not test, f"{next(iter(test), '')}: unknown field; an assert has type, code")
        checks.append(code)
    elif kind == "stdio":
        _need(not {"expected_stdout", "expected"}.isdisjoint(test), "expected_stdout: the field is missing")
        names = {"expected_stdout": "expected", "compare": "comparator"}
        cases.append(Case(**{names.get(name, name): value for name, value in test.items()}))
        called.add(None)
    elif kind == "call":
        name, arguments = test.pop("fn_name", None), test.pop("args", None)
        _need(isinstance(name, str), "fn_name: it must be a string")
        _need(isinstance(arguments, list), "args: it must be a list")
        _need("expected" in test, "expected: the field is missing")
        expected = json.dumps(test.pop("expected"))
        _need(not test, f"{next(iter(test), '')}: unknown field; a call has type, fn_name, args, expected")
        cases.append(Case(json.dumps(arguments), expected, comparator="json"))
        called.add(name)
    else:
        raise InvalidJob(f"type: {kind!r} is not one of assert, stdio, call")


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidJob(otherwise)
