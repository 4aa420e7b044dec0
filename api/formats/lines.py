"""What a dataset is read from: a file, plain or gzipped, standard input, or a folder of files."""

import gzip
import hashlib
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from api.formats.rows import MAX_ROW, Row, rows
from schemas.errors import InvalidJob


@dataclass(frozen=True)
class Lines:
    """Rows that can be read more than once, and are never all in memory."""

    name: str
    """As the user knows it."""
    file: Path
    extract: str = "none"
    """Which fenced block of a candidate's text is the program: `first` or `last`; `none` takes the text as it is."""

    def __iter__(self) -> Iterator[Row]:
        place = f"{self.name}:1"
        try:
            if self.file.is_dir():
                yield from self._folder()
                return
            with self._open() as stream:
                for row in rows(stream, self.name):
                    place = row.place
                    yield row
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InvalidJob(f"{place}: damaged gzip data here or below ({error})") from None
        except OSError as error:
            raise InvalidJob(f"{self.name}: {error.strerror}") from None

    @property
    def stem(self) -> str:
        """The name of the file without its folder and endings, for files that are named after it."""
        return Path(self.name).name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")

    def first(self) -> Row:
        """The first row."""
        for row in self:
            return row
        raise InvalidJob(f"{self.name}: nothing in it")

    def digest(self) -> str:
        """A hash of its bytes; of a folder, of the names and bytes of the files that are read."""
        try:
            if self.file.is_dir():
                parts = [(str(path.relative_to(self.file)), _digest(path)) for path in self._files()]
                return hashlib.sha256(repr(parts).encode()).hexdigest()
            return _digest(self.file)
        except OSError as error:
            raise InvalidJob(f"{self.name}: {error.strerror}") from None

    def _files(self) -> list[Path]:
        """Of a folder: MultiPL-E's one object for each problem, or evalplus' programs in one folder for each task."""
        objects = [path for path in self.file.iterdir() if path.name.endswith((".json", ".json.gz"))]
        objects = sorted(path for path in objects if ".results.json" not in path.name)  # MultiPL-E puts them beside
        programs = sorted(self.file.glob("*/*.py"), key=lambda path: [(len(part), part) for part in path.parts])
        if not objects and not programs:
            raise InvalidJob(f"{self.name}: a folder without *.json files or folders of *.py files such as HumanEval_0")
        return objects or programs

    def _folder(self) -> Iterator[Row]:
        for path in self._files():
            name = f"{self.name}/{path.relative_to(self.file)}"
            if path.suffix == ".py":
                yield Row({"task_id": path.parent.name.replace("_", "/"), "solution": _program(path, name)}, name)
            else:
                yield from Lines(name, path)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        with self.file.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"  # by content, since names lie
            stream.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if packed else stream


@contextmanager
def lines_of(path: str, extract: str = "none") -> Iterator[Lines]:
    """The rows of a file or folder, or of standard input for `-`. A pipe is copied, since it can be read but once."""
    if path != "-" and not Path(path).is_fifo():
        yield Lines(path, Path(path), extract)
        return
    with tempfile.NamedTemporaryFile(prefix="evalpool-") as copy:
        with nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as pipe:
            shutil.copyfileobj(pipe, copy)
        copy.flush()
        yield Lines("stdin" if path == "-" else path, Path(copy.name), extract)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _program(path: Path, name: str) -> str:
    with path.open("rb") as stream:
        data = stream.read(MAX_ROW + 1)
    if len(data) > MAX_ROW:
        raise InvalidJob(f"{name}: more than {MAX_ROW >> 20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidJob(f"{name}: not UTF-8 (byte {error.start + 1})") from None
