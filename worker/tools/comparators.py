"""How a program's output is compared with what was expected: outside the sandbox, and all of it.

Word by word and line by line, without a list of all of them: ten megabytes of output are a hundred of small strings.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from itertools import zip_longest

VERSION = 1
"""Of all comparators: it is raised when one of them comes to decide otherwise, and stored with every result."""
_WORD = re.compile(r"\S+")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf|infinity|nan)", re.IGNORECASE)
"""Not all that Python would take for one: `1_0` and digits of other scripts are text."""


def agrees(comparator: str, got: bytes, expected: str) -> bool:
    """Whether the output agrees under the comparator of this name."""
    if comparator == "exact":
        return got == expected.encode()
    text = got.decode("utf-8", "replace").replace("\r\n", "\n")
    expected = expected.replace("\r\n", "\n")
    if comparator == "rstrip":
        return text.rstrip("\n") == expected.rstrip("\n")
    if comparator == "tokens":
        return all(one == other for one, other in zip_longest(_words(text), _words(expected)))
    if comparator == "lcb":
        return _lines_agree(text, expected)
    if comparator in ("json", "json:unwrap"):
        return _values_agree(text, expected, unwrap=comparator == "json:unwrap")
    relative, _, absolute = comparator.removeprefix("float:").partition(",")
    pairs, margins = zip_longest(_words(text), _words(expected)), (float(relative), float(absolute or 0))
    return all(_close(one, other, *margins) for one, other in pairs)


def _values_agree(text: str, expected: str, *, unwrap: bool) -> bool:
    """Whether two JSON texts have equal values; unwrapped: or the one is the only element of the other."""
    try:
        got, wanted = (json.loads(each, parse_int=_whole) for each in (text, expected))
    except (ValueError, RecursionError):
        return False
    try:
        return bool(got == wanted or (unwrap and isinstance(wanted, list) and len(wanted) == 1 and got == wanted[0]))
    except RecursionError:
        return False


def _whole(digits: str) -> int | str:
    """Python converts no more than 4,300 digits; longer ones are equal if they look so."""
    return int(digits) if len(digits) < 4000 else digits


def _words(text: str) -> Iterator[str]:
    return (match[0] for match in _WORD.finditer(text))


def _lines(text: str) -> Iterator[str]:
    start = 0
    while (end := text.find("\n", start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def _close(got: str | None, expected: str | None, relative: float, absolute: float) -> bool:
    if got is None or expected is None:  # one of them has more words
        return False
    if _INTEGER.fullmatch(got) and _INTEGER.fullmatch(expected):
        return Decimal(got) == Decimal(expected)  # of any length, and never as floats
    if not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(expected)):
        return got == expected
    one, other = float(got), float(expected)
    if not math.isfinite(other):
        return got == expected and not math.isnan(other)
    return math.isfinite(one) and abs(one - other) <= max(absolute, relative * abs(other))


def _lines_agree(got: str, expected: str) -> bool:
    ours, theirs = got.strip(), expected.strip()
    return ours.count("\n") == theirs.count("\n") and all(
        _line_agrees(*pair) for pair in zip(_lines(ours), _lines(theirs), strict=True)
    )


def _line_agrees(got: str, expected: str) -> bool:
    if got.strip() == expected.strip():
        return True
    try:
        return all(
            None not in pair and all(map(_NUMBER.fullmatch, pair)) and Decimal(pair[0]) == Decimal(pair[1])
            for pair in zip_longest(_words(got), _words(expected))
        )
    except InvalidOperation:
        return False
