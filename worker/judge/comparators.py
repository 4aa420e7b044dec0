"""Compares a program's output with the expected output. This is done outside the sandbox.

Texts are compared word by word or line by line, without a list of all words: as strings, ten megabytes of words take a
hundred megabytes. The time is linear in the two texts, whatever they are. Run as a script, the module compares two
texts on its standard input. A worker uses this for large texts, since one word of some megabytes would hold the
interpreter lock. The module imports nothing of ours, so that the script starts quickly.
"""

import json
import math
import re
import resource
import sys
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from itertools import zip_longest

VERSION = 1
"""The version of all comparators, which is stored with every result. It is raised when one of them decides
differently."""
OTHERS = ("rstrip", "tokens", "lcb", "float:1e-6", "json")
"""The comparators that are tried on a wrong output, the strictest first, as one of them may be the intended one."""
WIDTH = 60
"""How many characters of a line are shown."""
MEMORY = 2 << 30
"""Bytes that the script may use, since JSON values take thirty times as much memory as their text."""
_WORD = re.compile(r"\S++")
_INTEGER = re.compile(r"[+-]?[0-9]++")
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:e[+-]?[0-9]++)?|inf|infinity|nan)", re.IGNORECASE)
"""Fewer texts than Python accepts as numbers: `1_0` and digits of other scripts are words. Digits are matched
possessively, since with backtracking a long word that is almost a number would take quadratic time."""

Place = tuple[int, int]
"""Where two texts differ: an index of the output and one of the expected output. An index beyond the end means that the
text has no such line or word."""


def agrees(comparator: str, got: bytes, expected: str) -> bool:
    """Whether the output agrees with the expected one, by the comparator of this name."""
    if comparator == "exact":
        return got == expected.encode()
    return _place(comparator, *_texts(comparator, got, expected)) is None


def surely(comparator: str, got: bytes, expected: str) -> bool:
    """Whether the output is the expected one to the letter, which is quickly decided."""
    if comparator not in ("rstrip", "tokens", "lcb"):
        return comparator == "exact" and got == expected.encode()
    one, other = got.rstrip(b"\n"), expected.encode().rstrip(b"\n")
    return one == other and not one.endswith(b"\r")  # as that may be half of a line break


def difference(comparator: str, got: bytes, expected: str) -> str:
    """Return a sentence of bounded length about the first difference, or nothing if the output agrees."""
    text, wanted = _texts(comparator, got, expected)
    place = _place(comparator, text, wanted)
    if place is None and (comparator != "exact" or got == expected.encode()):
        return ""
    differs = f"the output differs from what was expected (comparator {comparator})"
    if place is None:
        return f"{differs}: it has bytes that are not valid UTF-8"
    if text == wanted:
        return f"{differs}: the texts are equal, but are not JSON that can be compared"
    words = comparator == "tokens" or comparator.startswith("float:")
    line = _line_number(text, place[0]) if place[0] <= len(text) else _line_number(wanted, place[1])
    theirs, ours = (_shown(*each, word=words) for each in ((wanted, place[1]), (text, place[0])))
    other = next((each for each in OTHERS if each != comparator and _accepts(each, got, expected)), "")
    advice = f"; the comparator {other} would accept it" if other else ""
    return f"{differs} at line {line}: expected {theirs}, got {ours}{advice}"


def _texts(comparator: str, got: bytes, expected: str) -> tuple[str, str]:
    """Return both texts without what the comparator ignores."""
    text = got.decode("utf-8", "replace")
    if comparator == "exact":
        return text, expected
    text, expected = text.replace("\r\n", "\n"), expected.replace("\r\n", "\n")
    return (text.rstrip("\n"), expected.rstrip("\n")) if comparator == "rstrip" else (text, expected)


def _place(comparator: str, text: str, expected: str) -> Place | None:
    """Return where the texts first differ, or `None` if they agree."""
    if comparator in ("exact", "rstrip"):
        return _apart(text, expected)
    if comparator == "lcb":
        return _lines_apart(text, expected)
    if comparator in ("json", "json:unwrap"):
        agree = _values_agree(text, expected, unwrap=comparator == "json:unwrap")
        return None if agree else _apart(text, expected) or (0, 0)
    if comparator == "tokens":
        return _words_apart(text, expected, None)
    relative, _, absolute = comparator.removeprefix("float:").partition(",")
    return _words_apart(text, expected, (float(relative), float(absolute or 0)))


def _apart(text: str, expected: str) -> Place | None:
    """Return the first character that differs; if one text ends where the other has a line break, the next line."""
    if text == expected:
        return None
    low, high = 0, min(len(text), len(expected))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == expected[low:middle]:
            low = middle
        else:
            high = middle - 1
    at_end = low in (len(text), len(expected)) and "\n" in (text[low : low + 1], expected[low : low + 1])
    return (low + 1, low + 1) if at_end else (low, low)


def _words_apart(text: str, expected: str, margins: tuple[float, float] | None) -> Place | None:
    for one, other in zip_longest(_WORD.finditer(text), _WORD.finditer(expected)):
        if one is None:
            return len(text) + 1, other.start()
        if other is None:
            return one.start(), len(expected) + 1
        if one[0] != other[0] if margins is None else not _close(one[0], other[0], *margins):
            return one.start(), other.start()
    return None


def _values_agree(text: str, expected: str, *, unwrap: bool) -> bool:
    """Whether two JSON texts have equal values, or with `unwrap`, whether the one is the only element of the other."""
    try:
        got, wanted = (json.loads(each, parse_int=_whole) for each in (text, expected))
    except (ValueError, RecursionError, MemoryError):
        return False
    try:
        return bool(got == wanted or (unwrap and isinstance(wanted, list) and len(wanted) == 1 and got == wanted[0]))
    except RecursionError:
        return False


def _whole(digits: str) -> int | str:
    """Return an integer, or its digits if there are more than Python converts (4,300)."""
    return int(digits) if len(digits) < 4000 else digits


def _words(text: str) -> Iterator[str]:
    return (match[0] for match in _WORD.finditer(text))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the index of every line and the line itself, without the white space around the whole text."""
    start, last = len(text) - len(text.lstrip()), len(text.rstrip())
    while (end := text.find("\n", start, last)) >= 0:
        yield start, text[start:end]
        start = end + 1
    yield start, text[start : max(start, last)]


def _close(got: str, expected: str, relative: float, absolute: float) -> bool:
    if _INTEGER.fullmatch(got) and _INTEGER.fullmatch(expected):
        return Decimal(got) == Decimal(expected)  # exact for any length, which floats are not
    if not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(expected)):
        return got == expected
    one, other = float(got), float(expected)
    if not math.isfinite(other):
        return got == expected and not math.isnan(other)
    return math.isfinite(one) and abs(one - other) <= max(absolute, relative * abs(other))


def _lines_apart(text: str, expected: str) -> Place | None:
    for ours, theirs in zip_longest(_lines(text), _lines(expected)):
        if ours is None:
            return len(text) + 1, theirs[0]
        if theirs is None:
            return ours[0], len(expected) + 1
        if not _line_agrees(ours[1], theirs[1]):
            one, other = _apart(ours[1], theirs[1]) or (0, 0)
            return ours[0] + one, theirs[0] + other
    return None


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


# -- the sentence about a difference ---------------------------------------------------------------


def _line_number(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _shown(text: str, place: int, *, word: bool) -> str:
    """Return the line or the word at this place, shortened, and without control characters."""
    if place > len(text):
        return "no more output"
    if word:
        start, end = place, min(len(text), place + WIDTH + 1)
        end = start + len(text[start:end].split()[0])
    else:
        start, end = text.rfind("\n", 0, place) + 1, text.find("\n", place)
        end = len(text) if end < 0 else end
    first = start if end - start <= WIDTH else max(start, place - WIDTH // 3)
    last = min(end, first + WIDTH)
    shown = repr(text[first:last])  # which escapes what is not printable
    shown = shown if len(shown) <= 3 * WIDTH else shown[: 3 * WIDTH] + "…'"
    return f"{'…' if first > start else ''}{shown}{'…' if last < end else ''}"


def _accepts(other: str, got: bytes, expected: str) -> bool:
    return (other != "json" or expected.lstrip()[:1] in ("[", "{")) and agrees(other, got, expected)


def main() -> None:
    """Compare what is on standard input: an output of as many bytes as the second argument says, then the expected
    one."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    comparator, size = sys.argv[1], int(sys.argv[2])
    got, expected = sys.stdin.buffer.read(size), sys.stdin.buffer.read().decode()
    sys.stdout.buffer.write(difference(comparator, got, expected).encode())


if __name__ == "__main__":
    main()
