"""How much memory JSON takes once it is parsed, told from its text: up to fifty times its length. A file of some
kilobytes, gzipped, can hold a row that fills the memory."""

import re

from schemas.errors import InvalidJob

HEAVIEST = 256 << 20
"""Bytes that one parsed value may take: about six million numbers, or a million objects. What is long in a benchmark is
text, which is not counted here: rows are bounded in length, too."""
LIGHT = HEAVIEST // 64
"""Bytes of JSON that cannot take as much, whatever is in them."""
REMEDY = "give long inputs as text, or split it"

STRING, NUMBER, LIST, OBJECT, KEY = 50, 40, 90, 240, 60
"""What each costs beyond its text: as measured for the smallest ones of CPython."""
_MARKS = {b",": NUMBER, b"[": LIST, b"{": OBJECT, b":": KEY}
_COSTS = [_MARKS.get(bytes([byte]), 0) for byte in range(256)]
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # possessive: it must not remember its way


def weight(data: bytes) -> int:
    """About how many bytes this JSON takes once it is parsed, besides its text; counting ends beyond `HEAVIEST`."""
    total = start = 0
    for string in _STRING.finditer(data):
        here, end = string.span()
        # mostly one mark is between two strings
        total += STRING + (_COSTS[data[start]] if here - start == 1 else _between(data, start, here))
        if total > HEAVIEST:
            return total
        start = end
    return total + _between(data, start, len(data))


def check(data: str | bytes, name: str) -> None:
    """Raise `InvalidJob` if this JSON would take too much memory; to be asked before it is parsed."""
    if len(data) > LIGHT and weight(data if isinstance(data, bytes) else data.encode(errors="replace")) > HEAVIEST:
        raise InvalidJob(too_heavy(name))


def too_heavy(name: str) -> str:
    """What to say about it."""
    return f"{name} would take more than {HEAVIEST >> 20} MiB of memory once it is parsed; {REMEDY}"


def _between(data: bytes, start: int, end: int) -> int:
    """Of what stands outside of strings."""
    return sum(cost * data.count(mark, start, end) for mark, cost in _MARKS.items())
