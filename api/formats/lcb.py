"""LiveCodeBench: rows have `question_id` and one program or a list; or there are lists of programs in the order of
ids."""

import base64
import json
import pickletools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from evalpool.api.formats.calls import arguments, checked, decoded, judged
from evalpool.api.formats.lines import Lines
from evalpool.api.formats.rows import MAX_ROW, Row
from evalpool.api.formats.samples import Problem, Sample, candidates, few, numbered
from evalpool.api.formats.shelf import Problems
from evalpool.api.reports.summary import scores
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.job import Case, JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.report import Report, pass_at_k
from evalpool.schemas.result import Result
from evalpool.schemas.verdict import Verdict

TITLE = "LiveCodeBench outputs"
LIMITS: dict[str, float] = {"cpu_seconds": 6, "wall_seconds": 12}
CODES = {Verdict.PASSED: True, Verdict.WRONG_ANSWER: -2, Verdict.TIME_LIMIT: -3, Verdict.SANDBOX_ERROR: -5}
"""The harness's codes for verdicts. All others are -4, a runtime error."""
STRING = {"PROTO", "FRAME", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "MEMOIZE", "BINPUT", "STOP"}
"""The operations of which a pickle of one string consists."""


def matches(sample: Mapping[str, Any], problem: Mapping[str, Any] | None) -> bool:
    """Return whether the problems are LiveCodeBench's or, without problems, whether the samples name a question."""
    return "question_id" in sample if problem is None else "public_test_cases" in problem


def jobs(samples: Lines, problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Yield one job for each program, with all tests of its question: the public ones, then the private ones."""
    known = _problems(problems)
    return judged(_samples(samples, known), known, _tests, limits)


def references(problems: Lines | None, limits: Limits) -> Iterator[JobSpec]:
    """Raise `InvalidJob`, since the problems have no solutions."""
    raise InvalidJob("LiveCodeBench's problems have no reference solutions")


def count(samples: Lines, problems: Lines | None) -> int | None:
    """Return the number of problems."""
    return None if problems is None else sum(1 for _ in problems)


def write(samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report) -> Path:
    """Write LiveCodeBench's result file: scores, the grade of each test of each program, and notes."""
    order = {task: index for index, task in enumerate(sorted(_problems(problems)))}
    grades: dict[int, list[list[bool | int]]] = defaultdict(list)
    notes: dict[int, list[str]] = defaultdict(list)
    counts: dict[int, tuple[int, int]] = {}
    for result in results:
        if result.verdict is Verdict.CANCELLED:
            continue
        index = order[str(result.task_id)]
        grades[index].append(_grades(result))
        notes[index].append(json.dumps(_note(result)))
        if result.verdict.scored:
            scored, passed = counts.get(index, (0, 0))
            counts[index] = (scored + 1, passed + result.passed)
    each = {
        f"pass@{k}": {index: pass_at_k(n, passed, k) for index, (n, passed) in sorted(counts.items()) if n >= k}
        for k in report.pass_at_k
    }
    path = directory / f"{samples.stem}_eval.json"
    ordered = {index: grades[index] for index in sorted(grades)}
    with path.open("w", encoding="utf-8") as file:
        json.dump([{**scores(report), "detail": each}, ordered, [notes[index] for index in ordered]], file)
    return path


def _problems(problems: Lines | None) -> Problems:
    if problems is None:
        raise InvalidJob("the file of LiveCodeBench's problems is missing: --problems test.jsonl")
    return Problems(problems, _question)


def _question(row: Row) -> str:
    question = row.fields.get("question_id")
    if not isinstance(question, str | int):
        raise InvalidJob(f'{row.place}: "question_id" must be a string')
    return str(question)


def _samples(samples: Lines, known: Problems) -> Iterator[Sample]:
    order = sorted(known)

    def problem(row: Row) -> Problem:
        index = None if "question_id" in row.fields else row.fields.get("index")
        if not isinstance(index, int):
            question = _question(row)
            return Problem(question, known.of(row, question, "question_id"))
        if index not in range(len(order)):
            raise InvalidJob(f"{row.place}: {known.name} has only {len(order)} problems")
        return Problem(order[index], known[order[index]])

    return numbered(samples, problem, lambda row: candidates(row, ("code", "completion"), ("code_list", "generations")))


def _tests(problem: Mapping[str, Any]) -> dict[str, Any]:
    tests = [*_listed(problem, "public_test_cases"), *_listed(problem, "private_test_cases")]
    kinds = {test["testtype"] for test in tests}
    if kinds == {"stdin"}:
        return {"cases": [Case(test["input"], test["output"], comparator="lcb") for test in tests]}
    metadata = decoded(problem.get("metadata"), "metadata")
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    if kinds != {"functional"} or not name:
        found = f"the tests have the types {sorted(kinds)} and the function name {name!r}"
        raise InvalidJob(f"{found}; they must all be stdin, or all be functional with a function name")
    cases = [Case(arguments(test["input"]), checked(test["output"]), comparator="json") for test in tests]
    return {"cases": cases, "entry_point": name}


def _listed(problem: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    given = problem.get(name) or []
    if isinstance(given, str) and not given.lstrip().startswith("["):
        given = _unpacked(given, name)
    tests = decoded(given, name)
    few(tests if isinstance(tests, list) else [], f'"{name}"')
    for test in tests if isinstance(tests, list) else [None]:
        texts = [test.get(key) for key in ("input", "output", "testtype")] if isinstance(test, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidJob(f'"{name}" must be a list of objects with input, output and testtype')
    return list(tests)


def _unpacked(given: str, name: str) -> str:
    """Decode base64 of zlib of a pickle of one string. The pickle is never loaded, since it could run a program."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(given, validate=True), MAX_ROW)
        if not unpacker.unconsumed_tail:
            parts = [(code.name, value) for code, value, _ in islice(pickletools.genops(data), len(STRING))]
    except (ValueError, zlib.error) as error:
        raise InvalidJob(f'"{name}" is damaged ({error})') from None
    if unpacker.unconsumed_tail:
        raise InvalidJob(f'"{name}" has more than {MAX_ROW >> 20} MiB once it is unpacked')
    strings = [value for _, value in parts if isinstance(value, str)]
    if len(strings) != 1 or parts[-1][0] != "STOP" or not {code for code, _ in parts} <= STRING:
        raise InvalidJob(f'"{name}" is not a pickle of one string, and other pickles are not loaded')
    return strings[0]


def _grades(result: Result) -> list[bool | int]:
    grades = [CODES.get(case.verdict, -4) for case in result.cases]
    whole = CODES.get(result.verdict, -4)
    return grades if grades and (result.passed or grades[-1] is not True) else [*grades, whole]


def _note(result: Result) -> dict[str, Any]:
    if result.passed:
        return {"execution time": result.metrics.wall_seconds}
    return {"error_code": CODES.get(result.verdict, -4), "error_message": f"{result.verdict.value}: {result.detail}"}
