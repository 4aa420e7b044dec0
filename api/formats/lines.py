"""Files of JSON lines: plain or gzipped, from a path or standard input, and every complaint with file and line."""

import gzip
import hashlib
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from schemas.errors import InvalidJob
from schemas.job import MAX_JOB

MAX_LINE = 2 * MAX_JOB
"""Bytes of one line; more than this cannot be a job, and would only fill the memory."""


@dataclass(frozen=True)
class Row:
    """One line."""

    fields: dict[str, Any]
    place: str
    """`file:line`, for whoever has to complain about it."""


@dataclass(frozen=True)
class Lines:
    """A file of JSON lines that can be read more than once."""

    name: str
    """As the user knows it."""
    file: Path

    def __iter__(self) -> Iterator[Row]:
        number = 0
        try:
            with self._open() as stream:
                while line := stream.readline(MAX_LINE + 1):
                    number += 1
                    place = f"{self.name}:{number}"
                    if len(line) > MAX_LINE:
                        raise InvalidJob(f"{place}: a line of more than {MAX_LINE >> 20} MiB")
                    if not line.isspace():
                        yield Row(_parsed(line, place), place)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InvalidJob(f"{self.name}:{number + 1}: damaged gzip data ({error})") from None
        except OSError as error:
            raise InvalidJob(f"{self.name}: {error.strerror}") from None

    def digest(self) -> str:
        """A hash of its bytes."""
        try:
            with self.file.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise InvalidJob(f"{self.name}: {error.strerror}") from None

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        with self.file.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"  # by content, since names lie
            stream.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if packed else stream


@contextmanager
def lines_of(path: str) -> Iterator[Lines]:
    """The lines of a file, or of standard input for `-`. A pipe is copied, since it can be read but once."""
    if path != "-" and not Path(path).is_fifo():
        yield Lines(path, Path(path))
        return
    with tempfile.NamedTemporaryFile(prefix="evalpool-") as copy:
        with nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as pipe:
            shutil.copyfileobj(pipe, copy)
        copy.flush()
        yield Lines("stdin" if path == "-" else path, Path(copy.name))


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidJob(f"{place}: not UTF-8 (byte {error.start + 1} of the line)") from None
    except json.JSONDecodeError as error:
        raise InvalidJob(f"{place}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise InvalidJob(f"{place}: not JSON that can be read ({error})") from None
    if not isinstance(value, dict):
        raise InvalidJob(f"{place}: a JSON object is needed on each line, not {type(value).__name__}")
    return value
