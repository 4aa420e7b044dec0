"""bigcode: `generations.json`, a list of whole programs for each problem, in the order of the benchmark."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from api.formats import humaneval, mbpp
from api.formats.lines import Lines
from api.formats.rows import Row
from api.formats.samples import numbered, scores, texts
from schemas.errors import InvalidJob
from schemas.job import JobSpec
from schemas.limits import Limits
from schemas.report import Report
from schemas.result import Result

TITLE = "bigcode generations"
TEST_SPLIT = range(11, 511)
LIMITS: dict[str, float] = {"cpu_seconds": 3, "wall_seconds": 6}


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Whether a row was a list of programs."""
    return {"generations", "index"} <= sample.keys()


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """One job for each program; the n-th list belongs to the n-th problem."""
    source = problems or humaneval.bundled()
    benchmark, rest = _benchmark(source), _rows(source)

    def problem(row: Row) -> tuple[str | int, Mapping[str, Any]]:
        known = next(rest, None)
        if known is None:
            raise InvalidJob(f"{row.place}: more lists than there are problems in {source.name}")
        benchmark.identified(known)
        return known.fields["task_id"], known.fields

    for sample in numbered(samples, problem, lambda row: texts(row, "generations")):
        yield sample.job(limits, **benchmark.program(sample.problem, sample.text))


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Those of the benchmark."""
    source = problems or humaneval.bundled()
    found: Iterator[JobSpec] = _benchmark(source).references(source, limits)
    return found


def count(samples: Lines, problems: Lines | None) -> int | None:
    """How many problems there are."""
    return sum(1 for _ in _rows(problems or humaneval.bundled()))


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> Path:
    """bigcode's own result file: the scores, and how they were made."""
    name = _benchmark(problems or humaneval.bundled()).__name__.rpartition(".")[2]
    path = directory / "evaluation_results.json"
    made = {"generations": samples.name, **report.model_dump(mode="json")["made"]}
    path.write_text(json.dumps({name: scores(report), "config": made}, indent=2) + "\n", encoding="utf-8")
    return path


def _rows(problems: Lines) -> Iterator[Row]:
    """Those that bigcode asks for: of the whole of MBPP, which begins with task 1, its test split alone."""
    whole = problems.first().fields.get("task_id") == 1 and _benchmark(problems) is mbpp
    for row in problems:
        if not whole or row.fields.get("task_id") in TEST_SPLIT:
            yield row


def _benchmark(problems: Lines) -> ModuleType:
    return mbpp if "test_list" in problems.first().fields else humaneval
