"""Things put aside while files are read: in memory as long as they are few, then on disk."""

import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from api.formats.lines import Lines
from api.formats.rows import Row
from api.formats.weight import weight
from schemas.errors import InvalidJob

MEMORY = 64 << 20
"""Bytes of memory that the values of one shelf may take; further values go to disk."""


class Shelf:
    """Takes JSON values, and gives each back when it is asked for."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="evalpool-")  # noqa: SIM115 - open as long as the shelf is there
        self._size = 0
        weakref.finalize(self, self._file.close)

    def put(self, value: Any) -> Callable[[], Any]:
        """Put a value aside; the function that comes back is how to get it."""
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
    """The problems of a file by their ids, which `key` takes from a row that it finds valid."""

    def __init__(self, lines: Lines, key: Callable[[Row], str]) -> None:
        self.name = lines.name
        shelf = Shelf()
        self._known = {key(row): (row.place, shelf.put(row.fields)) for row in lines}

    def __getitem__(self, task: str) -> Mapping[str, Any]:
        problem: Mapping[str, Any] = self._known[task][1]()
        return problem

    def place(self, task: str) -> str:
        """Where a problem comes from, for whoever has to complain about it."""
        return self._known[task][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def of(self, row: Row, task: str, name: str = "task_id") -> Mapping[str, Any]:
        """The problem that a sample names; without one the sample cannot be judged."""
        if task not in self._known:
            raise InvalidJob(f"{row.place}: {name}: no problem {task!r} in {self.name}, which has {len(self)}")
        return self[task]
