"""Keeps values while files are read: in memory as long as they are small, then on disk."""

import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from evalpool.api.formats.lines import Lines
from evalpool.api.formats.rows import Row
from evalpool.api.formats.weight import weight
from evalpool.schemas.errors import InvalidJob

MEMORY = 64 << 20
"""Bytes of memory that the values of one shelf may take; further values go to disk."""


class Shelf:
    """Stores JSON values until they are needed."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="evalpool-")  # noqa: SIM115 - open as long as the shelf exists
        self._size = 0
        weakref.finalize(self, self._file.close)

    def put(self, value: Any) -> Callable[[], Any]:
        """Store a value, and return a function that returns it."""
        data = json.dumps(value).encode()
        self._size += len(data) + weight(data)
        if self._size <= MEMORY:
            return lambda: value
        start = self._file.seek(0, os.SEEK_END)
        self._file.write(data)
        return partial(self._read, start, len(data))

    def _read(self, start: int, size: int) -> Any:
        self._file.seek(start)
        return json.loads(self._file.read(size))


class Problems(Mapping[str, Mapping[str, Any]]):
    """The problems of a file by their ids. `key` returns the id of a row, or raises if the row is not valid."""

    def __init__(self, lines: Lines, key: Callable[[Row], str]) -> None:
        self.name = lines.name
        shelf = Shelf()
        self._known = {key(row): (row.place, shelf.put(row.fields)) for row in lines}

    def __getitem__(self, task: str) -> Mapping[str, Any]:
        problem: Mapping[str, Any] = self._known[task][1]()
        return problem

    def place(self, task: str) -> str:
        """Return the place of a problem, for error messages."""
        return self._known[task][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def of(self, row: Row, task: str, name: str = "task_id") -> Mapping[str, Any]:
        """Return the problem that a sample names. Raises `InvalidJob` if there is none."""
        if task not in self._known:
            raise InvalidJob(f"{row.place}: {name}: {self.name} does not contain the problem {task!r}")
        return self[task]
