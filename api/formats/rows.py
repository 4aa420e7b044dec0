"""From bytes to rows: an object on each line, an array of them, or one object over several lines, by what is there."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import ijson

from api.formats import weight
from schemas.errors import InvalidJob
from schemas.job import MAX_JOB

MAX_ROW = 2 * MAX_JOB
"""Bytes of one row; more than this cannot be a job, and would only fill the memory."""
MAX_DEPTH = 100
"""Of what is nested in an item of an array; every level costs memory before the item is complete."""


COSTS = {
    "start_map": weight.OBJECT,
    "map_key": weight.KEY + weight.STRING,
    "start_array": weight.LIST,
    "string": weight.STRING + weight.NUMBER,
}
"""Bytes of memory that each event of the parser stands for. Any other event costs as much as a number."""
CHUNK = 1 << 20
"""Bytes of an array that are parsed at a time. The parser begins a string anew with each of them, which is slow for a
long string and small ones."""


@dataclass(frozen=True)
class Row:
    """One object, or a list of programs as `generations` with its `index` in the file."""

    fields: dict[str, Any]
    place: str
    """`file:line`, for whoever has to complain about it."""


def rows(stream: BinaryIO, name: str) -> Iterator[Row]:
    """The rows of a file that can be rewound, one at a time; whatever is wrong is told with its name and the line."""
    start = _first(stream, 4096)[:1]
    if start == b"[":
        stream.seek(3 if stream.read(3) == codecs.BOM_UTF8 else 0)
        return _array(stream, name)
    if start == b"{" and _goes_on(_first(stream, MAX_ROW + 1)):
        return _object(stream, name)
    return _lines(stream, name)


def _first(stream: BinaryIO, most: int) -> bytes:
    """The first line that is not blank, cut to so many bytes; leaves the stream at its start."""
    line = b"\n"
    while line.isspace():
        line = stream.readline(most)
    stream.seek(0)
    return line.removeprefix(codecs.BOM_UTF8).strip()


def _goes_on(line: bytes) -> bool:
    """Whether an object begins on this line and just does not end there. A string never goes on: that is damage."""
    try:
        weight.check(line, "")
        text = line.decode()
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)
    except (ValueError, RecursionError):
        pass
    return False


def _lines(stream: BinaryIO, name: str) -> Iterator[Row]:
    number = 0
    while line := stream.readline(MAX_ROW + 1):
        number += 1
        if len(line) > MAX_ROW:
            raise InvalidJob(f"{name}:{number}: a line of more than {MAX_ROW >> 20} MiB")
        if not line.isspace():
            yield Row(_parsed(line, name, number), f"{name}:{number}")


def _object(stream: BinaryIO, name: str) -> Iterator[Row]:
    data = stream.read(MAX_ROW + 1)
    if len(data) > MAX_ROW:
        raise InvalidJob(f"{name}:1: an object of more than {MAX_ROW >> 20} MiB")
    yield Row(_parsed(data, name, 1), f"{name}:1")


def _parsed(data: bytes, name: str, line: int) -> dict[str, Any]:
    try:
        weight.check(data, "this row")
        value = json.loads(data.rstrip().decode("utf-8-sig"))
    except InvalidJob as error:
        raise InvalidJob(f"{name}:{line}: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidJob(f"{name}:{line}: not UTF-8 (byte {error.start + 1} of it)") from None
    except json.JSONDecodeError as error:
        place = f"{name}:{line + error.lineno - 1}"
        raise InvalidJob(f"{place}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise InvalidJob(f"{name}:{line}: not JSON that can be read ({error})") from None
    if not isinstance(value, dict):
        raise InvalidJob(f"{name}:{line}: a JSON object is needed on each line, not {type(value).__name__}")
    return value


def _array(stream: BinaryIO, name: str) -> Iterator[Row]:
    items = _items(stream)
    number = 0
    while True:
        number += 1
        place = f"{name}: item {number}"
        try:
            value = next(items, None)
        except ijson.JSONError as error:
            said = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
            raise InvalidJob(f"{place}: not JSON that can be read ({said.splitlines()[0]})") from None
        except ValueError as error:
            raise InvalidJob(f"{place}: {error}") from None
        if value is None:
            return
        yield Row(_item(value[0], number - 1, place), place)


def _item(value: Any, index: int, place: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return {"generations": value, "index": index}
    raise InvalidJob(f"{place}: an object or a list of strings is needed")


def _items(stream: BinaryIO) -> Iterator[tuple[Any]]:
    """Each item, in a tuple since an item may be null. Built from bare events: ijson's own `items` keeps the path to
    every level, and so needs gigabytes for a few kilobytes of opening brackets."""
    meter = _Meter(stream)
    builder, depth, cost = ijson.ObjectBuilder(), 0, 0
    for event, value in ijson.basic_parse(meter, CHUNK, use_float=True):
        depth += event.startswith("start_") - event.startswith("end_")
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        if depth == 0 or (depth == 1 and event == "start_array"):  # the array itself
            continue
        cost += COSTS.get(event, weight.NUMBER)
        if cost > weight.HEAVIEST:
            raise ValueError(weight.too_heavy("this item"))
        builder.event(event, value)
        if depth == 1:
            yield (builder.value,)
            builder, cost, meter.taken = ijson.ObjectBuilder(), 0, 0


class _Meter:
    """A stream that gives no more for one item than a row may have: a string without end would fill the memory."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.taken = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.taken += len(data)
        if self.taken > MAX_ROW + size:
            raise ValueError(f"more than {MAX_ROW >> 20} MiB")
        return data
