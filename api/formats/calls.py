"""What LiveCodeBench and APPS have in common: shared tests, usual imports, and calls with JSON arguments."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from evalpool.api.formats import weight
from evalpool.api.formats.samples import Sample, at
from evalpool.api.formats.shelf import Problems
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.job import JobSpec
from evalpool.schemas.limits import Limits

_MODULES = (
    "string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools, operator, "
    "io, sys, json"
)
PREAMBLE = (
    "; ".join(f"from {module} import *" for module in [*_MODULES.split(", "), "builtins", "typing"])
    + f"; import {_MODULES}; sys.setrecursionlimit(50000)\n"
)
"""Both harnesses put such imports before a candidate, and candidates rely on them, for example on `List` in a
signature. They are on one line, so that line numbers in a traceback are off by one only. The built-in names come late,
since `math` and others have their own `pow` or `open`."""


def judged(
    samples: Iterable[Sample],
    known: Problems | None,
    tests: Callable[[Mapping[str, Any]], dict[str, Any]],
    limits: Limits,
) -> Iterator[JobSpec]:
    """Yield a job for each sample, with the tests of its problem. Tests may have megabytes, so that consecutive samples
    of one problem share them. Errors in a test name the place of the problem."""
    last: Mapping[str, Any] | None = None
    fields: dict[str, Any] = {}
    for sample in samples:
        if sample.problem is not last:
            with at(sample.row.place if known is None else known.place(str(sample.task_id))):
                last, fields = sample.problem, tests(sample.problem)
        yield sample.job(limits, code=PREAMBLE + sample.text, **fields)


def checked(text: str) -> str:
    """Return JSON unchanged. Raises `InvalidJob` if it is not valid; numbers may have any length."""
    weight.check(text, "a value")
    try:
        json.loads(text, parse_int=str)
    except (ValueError, RecursionError) as error:
        raise InvalidJob(f"a value is not valid JSON ({error})") from None
    return text


def arguments(text: str) -> str:
    """Return lines with one JSON argument each as one JSON list."""
    return f"[{', '.join(checked(line) for line in text.split(chr(10)) if line.strip())}]"


def decoded(value: Any, name: str) -> Any:
    """Return the value of a field that may be JSON in a string. Raises `InvalidJob` naming the field."""
    if isinstance(value, str):
        weight.check(value, f'"{name}"')
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidJob(f'"{name}" is not valid JSON ({error})') from None
