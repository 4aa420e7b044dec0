"""How a program's output is compared with what was expected: outside the sandbox, and all of it."""

import math
import re
from decimal import Decimal, InvalidOperation

_INTEGER = re.compile(r"[+-]?[0-9]+")


def agrees(comparator: str, got: bytes, expected: str) -> bool:
    """Whether the output agrees under the comparator of this name."""
    if comparator == "exact":
        return got == expected.encode()
    text = got.decode("utf-8", "replace").replace("\r\n", "\n")
    expected = expected.replace("\r\n", "\n")
    if comparator == "rstrip":
        return text.rstrip("\n") == expected.rstrip("\n")
    if comparator == "tokens":
        return text.split() == expected.split()
    if comparator == "lcb":
        return _lines_agree(text, expected)
    relative, _, absolute = comparator.removeprefix("float:").partition(",")
    return _floats_agree(text.split(), expected.split(), float(relative), float(absolute or 0))


def _floats_agree(got: list[str], expected: list[str], relative: float, absolute: float) -> bool:
    return len(got) == len(expected) and all(
        _close(one, other, relative, absolute) for one, other in zip(got, expected, strict=True)
    )


def _close(got: str, expected: str, relative: float, absolute: float) -> bool:
    if _INTEGER.fullmatch(got) and _INTEGER.fullmatch(expected):
        return Decimal(got) == Decimal(expected)  # of any length, and never as floats
    try:
        one, other = float(got), float(expected)
    except ValueError:
        return got == expected
    if not math.isfinite(other):
        return got == expected and not math.isnan(other)
    return math.isfinite(one) and abs(one - other) <= max(absolute, relative * abs(other))


def _lines_agree(got: str, expected: str) -> bool:
    ours, theirs = got.strip().split("\n"), expected.strip().split("\n")
    return len(ours) == len(theirs) and all(_line_agrees(*pair) for pair in zip(ours, theirs, strict=True))


def _line_agrees(got: str, expected: str) -> bool:
    if got.strip() == expected.strip():
        return True
    try:
        return [Decimal(word) for word in got.split()] == [Decimal(word) for word in expected.split()]
    except InvalidOperation:
        return False
