"""MultiPL-E: a row for each problem, with its `completions`; or samples of `name` and `completion` beside problems."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from api.formats.lines import Lines
from api.formats.rows import Row
from api.formats.samples import Sample, candidates, numbered, text
from api.formats.shelf import Problems, Shelf
from schemas.errors import InvalidJob
from schemas.job import JobSpec
from schemas.limits import Limits
from schemas.report import Report
from schemas.result import Result
from schemas.verdict import Verdict

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
"""Its words for languages → ours, where they differ."""
STATUS = {Verdict.PASSED: "OK", Verdict.COMPILE_ERROR: "SyntaxError", Verdict.TIME_LIMIT: "Timeout"}
SHOWN = 2048
"""Characters of each stream that a result keeps."""


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Whether these are the keys of a problem."""
    return {"language", "prompt", "tests"} <= (sample if problem is None else problem).keys()


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """One job for each completion. Tests in Python are a check; in other languages they are part of the program."""
    for sample in _samples(samples, problems):
        language = LANGUAGES.get(sample.problem["language"], sample.problem["language"])
        if language == "python":
            code = sample.problem["prompt"] + sample.text
            yield sample.job(limits, code=code, check=sample.problem["tests"])
        else:
            yield sample.job(limits, tool="multi_code_executor", language=language, code=_program(sample))


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """None: its problems have no solutions."""
    raise InvalidJob("MultiPL-E's problems bring no reference solutions")


def count(samples: Lines, problems: Lines | None) -> int | None:
    """How many problems there are; not known if the samples bring their own."""
    return None if problems is None else sum(1 for _ in problems)


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> Path:
    """A file for each problem, in a folder: the problem, and what came of each completion. Without a verdict it is
    left out, as MultiPL-E has no word for that."""
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
        name = re.sub(r"[^\w.-]", "_", str(task))[:200]  # it comes from a file, and must not lead out of the folder
        with (folder / f"{name}.results.json").open("w", encoding="utf-8") as file:
            file.write(json.dumps(head()).removesuffix("}") + ', "results": [')
            file.writelines((", " if index else "") + json.dumps(get()) for index, get in enumerate(entries[task]))
            file.write("]}\n")
    return folder


def _samples(samples: Lines, problems: Lines | None) -> Iterator[Sample]:
    known = Problems(problems, _identified) if problems else None

    def problem(row: Row) -> tuple[str, Mapping[str, Any]]:
        if known is None:
            return _identified(row), row.fields
        name = _name(row)
        return name, known.of(row, name, "name")

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
