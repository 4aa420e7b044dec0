"""Estimates from its text how much memory JSON takes once it is parsed: up to fifty times its length. A gzipped file of
a few kilobytes can hold a row that fills the memory."""

import re

from evalpool.schemas.errors import InvalidJob

HEAVIEST = 256 << 20
"""Bytes that one parsed value may take: about six million numbers, or a million objects. The characters of strings are
not counted here: long rows of benchmarks are mostly text, and the length of a row is bounded elsewhere."""
LIGHT = HEAVIEST // 64
"""JSON up to this many bytes is not weighed: it cannot take more than `HEAVIEST`, whatever it contains."""
REMEDY = "pass long inputs as strings, or split it"

STRING, NUMBER, LIST, OBJECT, KEY = 50, 40, 90, 240, 60
"""Bytes that each takes beyond its text, as measured with the smallest values in CPython."""
_MARKS = {b",": NUMBER, b"[": LIST, b"{": OBJECT, b":": KEY}
_COSTS = [_MARKS.get(bytes([byte]), 0) for byte in range(256)]
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # possessive, as backtracking would take memory


def weight(data: bytes) -> int:
    """About how many bytes this JSON takes once it is parsed, besides its text. Counting stops above `HEAVIEST`."""
    total = start = 0
    for string in _STRING.finditer(data):
        here, end = string.span()
        # the usual case, made fast: a single comma or colon between two strings
        total += STRING + (_COSTS[data[start]] if here - start == 1 else _between(data, start, here))
        if total > HEAVIEST:
            return total
        start = end
    return total + _between(data, start, len(data))


def check(data: str | bytes, name: str) -> None:
    """Raise `InvalidJob` if this JSON would take too much memory. Call it before the JSON is parsed."""
    if len(data) > LIGHT and weight(data if isinstance(data, bytes) else data.encode(errors="replace")) > HEAVIEST:
        raise InvalidJob(too_heavy(name))


def too_heavy(name: str) -> str:
    """The error message about JSON that is too heavy."""
    return f"{name} would take more than {HEAVIEST >> 20} MiB of memory once it is parsed; {REMEDY}"


def _between(data: bytes, start: int, end: int) -> int:
    """The weight of a piece of JSON that contains no string."""
    return sum(cost * data.count(mark, start, end) for mark, cost in _MARKS.items())
