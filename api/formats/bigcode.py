"""bigcode: `generations.json` has a list of whole programs for each problem, in the order of the benchmark."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from evalpool.api.formats import humaneval, mbpp
from evalpool.api.formats.lines import Lines
from evalpool.api.formats.rows import Row
from evalpool.api.formats.samples import Problem, numbered, texts
from evalpool.api.reports.summary import scores
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.job import JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result

TITLE = "bigcode generations"
TEST_SPLIT = range(11, 511)
LIMITS: dict[str, float] = {"cpu_seconds": 3, "wall_seconds": 6}


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Return whether the row was a list of programs."""
    return {"generations", "index"} <= sample.keys()


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield one job for each program. The n-th list belongs to the n-th problem."""
    source = problems or humaneval.bundled()
    benchmark, rest = _benchmark(source), _rows(source)

    def problem(row: Row) -> Problem:
        known = next(rest, None)
        if known is None:
            raise InvalidJob(f"{row.place}: the file has more lists than {source.name} has problems")
        benchmark.identified(known)
        return Problem(known.fields["task_id"], known.fields)

    for sample in numbered(samples, problem, lambda row: texts(row, "generations")):
        yield sample.job(limits, **benchmark.program(sample.problem, sample.text))


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield the reference solutions of the benchmark."""
    source = problems or humaneval.bundled()
    found: Iterator[JobSpec] = _benchmark(source).references(source, limits)
    return found


def count(samples: Lines, problems: Lines | None) -> int | None:
    """Return the number of problems."""
    return sum(1 for _ in _rows(problems or humaneval.bundled()))


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> Path:
    """Write bigcode's result file: the scores, and how they were made."""
    name = _benchmark(problems or humaneval.bundled()).__name__.rpartition(".")[2]
    path = directory / "evaluation_results.json"
    made = {"generations": samples.name, **report.model_dump(mode="json")["made"]}
    path.write_text(json.dumps({name: scores(report), "config": made}, indent=2) + "\n", encoding="utf-8")
    return path


def _rows(problems: Lines) -> Iterator[Row]:
    """Yield the problems that bigcode uses. Of the complete MBPP, which begins with task 1, this is the test split."""
    whole = problems.first().fields.get("task_id") == 1 and _benchmark(problems) is mbpp
    for row in problems:
        if not whole or row.fields.get("task_id") in TEST_SPLIT:
            yield row


def _benchmark(problems: Lines) -> ModuleType:
    return mbpp if "test_list" in problems.first().fields else humaneval
