"""evalpool's own rows: one job per line, by JobSpec's names or by the short ones of a dataset row."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from api.formats.lines import Lines
from schemas.errors import InvalidJob
from schemas.job import Case, JobSpec
from schemas.limits import Limits
from schemas.result import Result

TITLE = "native jobs"
LIMITS: dict[str, tuple[str, int]] = {
    "cpu_s": ("cpu_seconds", 1),
    "wall_s": ("wall_seconds", 1),
    "memory_mb": ("memory_mib", 1),
    "pids": ("processes", 1),
    "output_kb": ("output_bytes", 1024),
}
"""Short names of limits → ours, and how many of our units they count."""


def matches(fields: Mapping[str, Any]) -> bool:
    """Whether a row looks like one of these jobs."""
    return "code" in fields


def jobs(rows: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """One job for each row; a limit that a row names wins over the given ones."""
    if problems is not None:
        raise InvalidJob(f"{problems.name}: native rows bring their checks along; --problems is for other formats")
    for row in rows:
        try:
            yield job(row.fields, limits)
        except InvalidJob as error:
            raise InvalidJob(f"{row.place}: {error}") from None


def job(row: Mapping[str, Any], limits: Limits) -> JobSpec:
    """The job of one row."""
    fields = dict(row)
    fields["limits"] = _limits(fields.get("limits", {}), limits)
    _labels(fields)
    if "tests" in fields:
        _tests(fields)
    if "tool" not in fields and fields.get("language", "python") != "python":
        fields["tool"] = "multi_code_executor"
    return JobSpec(**fields)


def write(_rows: Lines, _results: Iterable[Result], _directory: Path) -> None:
    """Nothing: `results.jsonl` is this format's result file."""


def _limits(given: Any, default: Limits) -> Limits:
    _need(isinstance(given, dict), "limits: an object is needed")
    chosen: dict[str, Any] = {}
    for name, value in given.items():
        ours, unit = LIMITS.get(name, (name, 1))
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
    _need(isinstance(tests, list), "tests: a list is needed")
    _need(not fields.keys() & {"check", "cases"}, "tests: the row has check or cases too; give one of them")
    checks: list[str] = []
    cases: list[Case] = []
    for index, test in enumerate(tests):
        place = f"tests.{index}"
        _need(isinstance(test, dict), f"{place}: an object is needed")
        try:
            _test(dict(test), checks, cases)
        except InvalidJob as error:
            raise InvalidJob(f"{place}.{error}") from None
    if checks:
        fields["check"] = "\n".join(checks)
    if cases:
        fields["cases"] = cases


def _test(test: dict[str, Any], checks: list[str], cases: list[Case]) -> None:
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
    elif kind == "call":
        raise InvalidJob("type: 'call' tests are not supported yet; write an assert instead")
    else:
        raise InvalidJob(f"type: {kind!r} is not one of assert, stdio")


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidJob(otherwise)
