"""Reads rows from bytes: an object on each line, an array of objects, or one object over several lines."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import ijson

from evalpool.api.formats import weight
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.job import MAX_JOB

MAX_ROW = 2 * MAX_JOB
"""Bytes of one row. A longer row cannot be a job, and would only fill the memory."""
MAX_DEPTH = 100
"""Levels of nesting in an item of an array. Every level costs memory before the item is complete."""
COSTS = {
    "start_map": weight.OBJECT,
    "map_key": weight.KEY + weight.STRING,
    "start_array": weight.LIST,
    "string": weight.STRING + weight.NUMBER,
}
"""Bytes of memory that each event of the parser stands for. Any other event costs as much as a number."""
CHUNK = 1 << 20
"""Bytes of an array that are parsed at a time. With each chunk the parser starts an unfinished string again, so small
chunks make long strings slow."""


@dataclass(frozen=True)
class Row:
    """One object of a file. A list of programs becomes an object with `generations` and its `index` in the file."""

    fields: dict[str, Any]
    place: str
    """`file:line`, for error messages."""


def rows(stream: BinaryIO, name: str) -> Iterator[Row]:
    """Yield the rows of a file, which must be seekable. Raises `InvalidJob` with the file's name and the line."""
    start = _first(stream, 4096)[:1]
    if start == b"[":
        stream.seek(3 if stream.read(3) == codecs.BOM_UTF8 else 0)
        return _array(stream, name)
    if start == b"{" and _goes_on(_first(stream, MAX_ROW + 1)):
        return _object(stream, name)
    return _lines(stream, name)


def _first(stream: BinaryIO, most: int) -> bytes:
    """Return at most `most` bytes of the first line that is not blank, and go back to the start of the stream."""
    line = b"\n"
    while line.isspace():
        line = stream.readline(most)
    stream.seek(0)
    return line.removeprefix(codecs.BOM_UTF8).strip()


def _goes_on(line: bytes) -> bool:
    """Return whether an object begins on this line and ends on a later one. A line that ends inside a string is an
    error, not such an object."""
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
            raise InvalidJob(f"{name}:{number}: the line is longer than {MAX_ROW >> 20} MiB")
        if not line.isspace():
            yield Row(_parsed(line, name, number), f"{name}:{number}")


def _object(stream: BinaryIO, name: str) -> Iterator[Row]:
    data = stream.read(MAX_ROW + 1)
    if len(data) > MAX_ROW:
        raise InvalidJob(f"{name}:1: the object is larger than {MAX_ROW >> 20} MiB")
    yield Row(_parsed(data, name, 1), f"{name}:1")


def _parsed(data: bytes, name: str, line: int) -> dict[str, Any]:
    try:
        weight.check(data, "this row")
        value = json.loads(data.rstrip().decode("utf-8-sig"))
    except InvalidJob as error:
        raise InvalidJob(f"{name}:{line}: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidJob(f"{name}:{line}: the text is not valid UTF-8 (byte {error.start + 1} of the line)") from None
    except json.JSONDecodeError as error:
        place = f"{name}:{line + error.lineno - 1}"
        raise InvalidJob(f"{place}: not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise InvalidJob(f"{name}:{line}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidJob(f"{name}:{line}: each line must be a JSON object, not {type(value).__name__}")
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
            message = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
            raise InvalidJob(f"{place}: not valid JSON ({message.splitlines()[0]})") from None
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
    raise InvalidJob(f"{place}: each item must be an object or a list of strings")


def _items(stream: BinaryIO) -> Iterator[tuple[Any]]:
    """Yield each item, in a tuple since an item may be null. The items are built from single events, because ijson's
    own `items` keeps the path to every level and needs gigabytes for a few kilobytes of opening brackets."""
    meter = _Meter(stream)
    builder, depth, cost = ijson.ObjectBuilder(), 0, 0
    for event, value in ijson.basic_parse(meter, CHUNK, use_float=True):
        depth += event.startswith("start_") - event.startswith("end_")
        if depth > MAX_DEPTH:
            raise ValueError(f"the item is nested more than {MAX_DEPTH} levels deep")
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
    """A stream that stops with an error if one item is longer than allowed, since an endless string would fill the
    memory."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.taken = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.taken += len(data)
        if self.taken > MAX_ROW + size:
            raise ValueError(f"the item is larger than {MAX_ROW >> 20} MiB")
        return data
