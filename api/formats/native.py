"""evalpool's own rows: one job per line, by JobSpec's names or by the short ones of a dataset row."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from api.formats.lines import Lines
from api.formats.samples import at, few, unfenced
from schemas import ceilings
from schemas.errors import InvalidJob
from schemas.job import Case, JobSpec
from schemas.limits import Limits
from schemas.report import Report
from schemas.result import Result
from schemas.settings import settings

TITLE = "native jobs"
LIMITS: dict[str, float] = {}
SHORT: dict[str, tuple[str, int]] = {
    "cpu_s": ("cpu_seconds", 1),
    "wall_s": ("wall_seconds", 1),
    "memory_mb": ("memory_mib", 1),
    "pids": ("processes", 1),
    "output_kb": ("output_bytes", 1024),
}
"""Short names of limits → ours, and how many of our units they count."""


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Whether these are the keys of a job."""
    return "code" in sample


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """One job for each row; a limit that a row names wins over the given ones."""
    if problems is not None:
        raise InvalidJob(f"{problems.name}: native rows bring their checks along; --problems is for other formats")
    now = settings()
    for row in samples:
        with at(row.place):
            spec = job(row.fields, limits, samples.extract)
            ceilings.check(spec.limits, now)
        yield spec


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """None: there are no problems."""
    raise InvalidJob("native rows bring no reference solutions")


def count(samples: Lines, problems: Lines | None) -> int | None:
    """Not known: a row is all there is."""
    return None


def job(row: Mapping[str, Any], limits: Limits, extract: str = "none") -> JobSpec:
    """The job of one row."""
    fields = dict(row)
    if isinstance(fields.get("code"), str):
        fields["code"] = unfenced(fields["code"], extract)
    fields["limits"] = _limits(fields.get("limits", {}), limits)
    _labels(fields)
    if "tests" in fields:
        _tests(fields)
    return JobSpec(**fields)


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> None:
    """Nothing: `results.jsonl` is this format's result file."""


def _limits(given: Any, default: Limits) -> Limits:
    _need(isinstance(given, dict), "limits: an object is needed")
    chosen: dict[str, Any] = {}
    for name, value in given.items():
        ours, unit = SHORT.get(name, (name, 1))
        _need(ours not in chosen, f"limits.{name}: given twice, as {ours} too")
        _need(unit == 1 or type(value) is int, f"limits.{name}: a whole number is needed")
        chosen[ours] = value * unit
    try:
        return Limits(**default.model_dump() | chosen)
    except InvalidJob as error:
        raise InvalidJob(f"limits.{error}") from None


def _labels(fields: dict[str, Any]) -> None:
    """`metadata` is another word for labels, and a `custom_id` is one of them."""
    labels = fields.pop("metadata", None)
    if labels is not None:
        _need("labels" not in fields, "metadata: the row has labels too; give one of them")
        _need(isinstance(labels, dict), "metadata: an object is needed")
        fields["labels"] = labels
    if "custom_id" in fields:
        _need(isinstance(fields.get("labels") or {}, dict), "labels: an object is needed")
        fields["labels"] = {**(fields.get("labels") or {}), "custom_id": fields.pop("custom_id")}


def _tests(fields: dict[str, Any]) -> None:
    tests = fields.pop("tests")
    _need(isinstance(tests, list) and len(tests) > 0, "tests: a list of at least one is needed")
    few(tests, "tests")
    _need(not fields.keys() & {"check", "cases"}, "tests: the row has check or cases too; give one of them")
    checks: list[str] = []
    cases: list[Case] = []
    called: set[str | None] = set()
    for index, test in enumerate(tests):
        place = f"tests.{index}"
        _need(isinstance(test, dict), f"{place}: an object is needed")
        try:
            _test(dict(test), checks, cases, called)
        except InvalidJob as error:
            raise InvalidJob(f"{place}.{error}") from None
        _need(len(called) <= 1, f"{place}: all cases of a job are stdio, or calls of one function")
    if checks:
        fields["check"] = "\n".join(checks)
    if cases:
        fields["cases"] = cases
    if called - {None}:
        _need("entry_point" not in fields, "entry_point: the tests name it; leave it out")
        (fields["entry_point"],) = called


def _test(test: dict[str, Any], checks: list[str], cases: list[Case], called: set[str | None]) -> None:
    """Adds what one test asks for; `called` are the functions of the cases, `None` for standard input."""
    kind = test.pop("type", None)
    if kind == "assert":
        code = test.pop("code", None)
        _need(isinstance(code, str), "code: a string is needed")
        _need(not test, f"{next(iter(test), '')}: unknown field; an assert has type, code")
        checks.append(code)
    elif kind == "stdio":
        _need(not {"expected_stdout", "expected"}.isdisjoint(test), "expected_stdout: Field required")
        names = {"expected_stdout": "expected", "compare": "comparator"}
        cases.append(Case(**{names.get(name, name): value for name, value in test.items()}))
        called.add(None)
    elif kind == "call":
        name, arguments = test.pop("fn_name", None), test.pop("args", None)
        _need(isinstance(name, str), "fn_name: a string is needed")
        _need(isinstance(arguments, list), "args: a list is needed")
        _need("expected" in test, "expected: Field required")
        expected = json.dumps(test.pop("expected"))
        _need(not test, f"{next(iter(test), '')}: unknown field; a call has type, fn_name, args, expected")
        cases.append(Case(json.dumps(arguments), expected, comparator="json"))
        called.add(name)
    else:
        raise InvalidJob(f"type: {kind!r} is not one of assert, stdio, call")


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidJob(otherwise)
