"""Opens a dataset: a file, plain or gzipped, standard input, or a folder of files."""

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

from evalpool.api.formats.rows import MAX_ROW, Row, rows
from evalpool.schemas.errors import InvalidJob


@dataclass(frozen=True)
class Lines:
    """The rows of a dataset, which can be read more than once and are never all in memory."""

    name: str
    """The name that error messages show."""
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
            raise InvalidJob(f"{place}: the gzip data is damaged at or after this line ({error})") from None
        except OSError as error:
            raise InvalidJob(f"{self.name}: {error.strerror}") from None

    @property
    def stem(self) -> str:
        """The name of the file without its folder and extensions."""
        return Path(self.name).name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")

    def first(self) -> Row:
        """Return the first row. Raises `InvalidJob` if there is none."""
        for row in self:
            return row
        raise InvalidJob(f"{self.name}: the file is empty")

    def digest(self) -> str:
        """Return a hash of the file's bytes, or of the names and bytes of the files of a folder."""
        try:
            if self.file.is_dir():
                parts = [(str(path.relative_to(self.file)), _digest(path)) for path in self._files()]
                return hashlib.sha256(repr(parts).encode()).hexdigest()
            return _digest(self.file)
        except OSError as error:
            raise InvalidJob(f"{self.name}: {error.strerror}") from None

    def _files(self) -> list[Path]:
        """Return the files of a folder: one JSON file for each problem (MultiPL-E), or a folder of programs for each
        task (evalplus)."""
        objects = [path for path in self.file.iterdir() if path.name.endswith((".json", ".json.gz"))]
        objects = sorted(
            path for path in objects if ".results.json" not in path.name
        )  # MultiPL-E writes them to the same folder
        programs = sorted(self.file.glob("*/*.py"), key=lambda path: [(len(part), part) for part in path.parts])
        if not objects and not programs:
            raise InvalidJob(
                f"{self.name}: the folder has neither *.json files nor folders of *.py files such as HumanEval_0"
            )
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
            packed = stream.read(2) == b"\x1f\x8b"  # by content, since the name may be wrong
            stream.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if packed else stream


@contextmanager
def lines_of(path: str, extract: str = "none") -> Iterator[Lines]:
    """Open a file or folder, or standard input for `-`. A pipe is copied, since it can be read only once."""
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
        raise InvalidJob(f"{name}: the file is larger than {MAX_ROW >> 20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidJob(f"{name}: the file is not valid UTF-8 (byte {error.start + 1})") from None
