"""MultiPL-E: a row for each problem with its `completions`, or samples with `name` and `completion` and a file of
problems."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evalpool.api.formats.lines import Lines
from evalpool.api.formats.rows import Row
from evalpool.api.formats.samples import Problem, Sample, candidates, numbered, text
from evalpool.api.formats.shelf import Problems, Shelf
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.job import JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result
from evalpool.schemas.verdict import Verdict

TITLE = "MultiPL-E completions"
LIMITS: dict[str, float] = {"cpu_seconds": 15, "wall_seconds": 30}
LANGUAGES = {
    "py": "python",
    "sh": "bash",
    "js": "javascript",
    "ts": "typescript",
    "rb": "ruby",
    "pl": "perl",
    "rs": "rust",
    "go_test.go": "go_test",
}
"""Its names of languages → ours, where they differ."""
STATUS = {Verdict.PASSED: "OK", Verdict.COMPILE_ERROR: "SyntaxError", Verdict.TIME_LIMIT: "Timeout"}
SHOWN = 2048
"""Characters of standard output and of standard error that a result keeps."""


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Return whether the row has the keys of a problem."""
    return {"language", "prompt", "tests"} <= (sample if problem is None else problem).keys()


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield one job for each completion. Tests in Python are a check; in other languages they are part of the
    program."""
    for sample in _samples(samples, problems):
        language = LANGUAGES.get(sample.problem["language"], sample.problem["language"])
        if language == "python":
            code = sample.problem["prompt"] + sample.text
            yield sample.job(limits, code=code, check=sample.problem["tests"])
        else:
            yield sample.job(limits, tool="multi_code_executor", language=language, code=_program(sample))


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Raise `InvalidJob`, since the problems have no solutions."""
    raise InvalidJob("MultiPL-E's problems have no reference solutions")


def count(samples: Lines, problems: Lines | None) -> int | None:
    """Return the number of problems, which is not known if the samples contain their own."""
    return None if problems is None else sum(1 for _ in problems)


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> Path:
    """Write a folder with a file for each problem: the problem, and the outcome of each completion. Completions without
    a verdict are left out, since MultiPL-E has no status for them."""
    shelf = Shelf()
    heads: dict[Any, Callable[[], Any]] = {}
    entries: dict[Any, list[Callable[[], Any]]] = defaultdict(list)
    for sample, result in zip(_samples(samples, problems), results, strict=True):
        if sample.task_id not in heads:
            fields = {
                name: value for name, value in sample.problem.items() if name not in ("completion", "completions")
            }
            heads[sample.task_id] = shelf.put(fields)
        if result.verdict.scored:
            entries[sample.task_id].append(shelf.put({"program": _program(sample), **_outcome(result)}))
    folder = directory / "multipl-e"
    folder.mkdir(exist_ok=True)
    for task, head in heads.items():
        name = re.sub(r"[^\w.-]", "_", str(task))[:200]  # a name from a file must not lead out of the folder
        with (folder / f"{name}.results.json").open("w", encoding="utf-8") as file:
            file.write(json.dumps(head()).removesuffix("}") + ', "results": [')
            file.writelines((", " if index else "") + json.dumps(get()) for index, get in enumerate(entries[task]))
            file.write("]}\n")
    return folder


def _samples(samples: Lines, problems: Lines | None) -> Iterator[Sample]:
    known = Problems(problems, _identified) if problems else None

    def problem(row: Row) -> Problem:
        if known is None:
            return Problem(_identified(row), row.fields)
        name = _name(row)
        return Problem(name, known.of(row, name, "name"))

    return numbered(samples, problem, lambda row: candidates(row, ("completion",), ("completions",)))


def _identified(row: Row) -> str:
    for name in ("language", "prompt", "tests"):
        text(row, name)
    return _name(row)


def _name(row: Row) -> str:
    return text(row, "name" if "name" in row.fields else "task_id")


def _program(sample: Sample) -> str:
    return f"{sample.problem['prompt']}{sample.text}\n{sample.problem['tests']}"


def _outcome(result: Result) -> dict[str, Any]:
    return {
        "stdout": result.stdout[:SHOWN],
        "stderr": result.stderr[:SHOWN],
        "exit_code": -1 if result.exit_code is None else result.exit_code,
        "status": STATUS.get(result.verdict, "Exception"),
        "timestamp": int(result.finished_at.timestamp()),
    }
