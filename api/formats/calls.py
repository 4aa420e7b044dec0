"""What LiveCodeBench and APPS have in common: tests that samples share, the imports they lean on, calls with JSON."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from api.formats import weight
from api.formats.samples import Sample, at
from api.formats.shelf import Problems
from schemas.errors import InvalidJob
from schemas.job import JobSpec
from schemas.limits import Limits

_MODULES = (
    "string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools, operator, "
    "io, sys, json"
)
PREAMBLE = (
    "; ".join(f"from {module} import *" for module in [*_MODULES.split(", "), "builtins", "typing"])
    + f"; import {_MODULES}; sys.setrecursionlimit(50000)\n"
)
"""Both harnesses put such imports before a candidate, and candidates rely on them: `List` in a signature, most of all.
On one line, so that the lines of a traceback are off by one only. The built-in names come late, since `math` and others
have a `pow` or an `open` of their own."""


def judged(
    samples: Iterable[Sample],
    known: Problems | None,
    tests: Callable[[Mapping[str, Any]], dict[str, Any]],
    limits: Limits,
) -> Iterator[JobSpec]:
    """A job for each sample with the tests of its problem, which may be megabytes and are made once for those that
    follow each other. What is wrong with a test is told with the place of the problem."""
    last: Mapping[str, Any] | None = None
    fields: dict[str, Any] = {}
    for sample in samples:
        if sample.problem is not last:
            with at(sample.row.place if known is None else known.place(str(sample.task_id))):
                last, fields = sample.problem, tests(sample.problem)
        yield sample.job(limits, code=PREAMBLE + sample.text, **fields)


def checked(text: str) -> str:
    """JSON as it stands; a number of any length is fine."""
    weight.check(text, "a value")
    try:
        json.loads(text, parse_int=str)
    except (ValueError, RecursionError) as error:
        raise InvalidJob(f"not JSON ({error})") from None
    return text


def arguments(text: str) -> str:
    """Lines with one JSON argument each, as one JSON list."""
    return f"[{', '.join(checked(line) for line in text.split(chr(10)) if line.strip())}]"


def decoded(value: Any, name: str) -> Any:
    """A field that is JSON in a string, or already the value."""
    if isinstance(value, str):
        weight.check(value, f'"{name}"')
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidJob(f'"{name}" is not JSON ({error})') from None
