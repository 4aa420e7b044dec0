"""Finds signs that the setup of a batch is at fault, and not its programs: a module that the image lacks, a limit that
nearly all samples reach, an error that nearly all of them have."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from evalpool.schemas import images
from evalpool.schemas.report import Failure
from evalpool.schemas.verdict import Verdict

FEW, SHARE = 2, 0.02
"""A warning is given if at least this many samples, and at least this share of all samples, lack the same thing."""
SEVERAL, NEARLY_ALL = 3, 0.8
"""A warning is given if at least this many samples, and at least this share of all samples, end in the same way."""
KEPT, WORDS = 10_000, 300
"""How many different errors are counted, and how many characters of each are compared. An error that nearly all samples
share is among the first."""
REASONS = 5
"""How many reasons for failures a report has."""
T = TypeVar("T")
LIMITS = {Verdict.TIME_LIMIT: "time", Verdict.MEMORY_LIMIT: "memory", Verdict.OUTPUT_LIMIT: "output"}
ERRORS = (Verdict.RUNTIME_ERROR, Verdict.COMPILE_ERROR, Verdict.EARLY_EXIT)
"""The verdicts for which the same message means the same error. Wrong answers always have similar messages."""

_CASE = re.compile(r"\d+ of \d+ cases passed; case \d+: ")
_MISSING = (
    ("module", re.compile(r"ModuleNotFoundError: No module named '([^']{1,100})'")),
    ("module", re.compile(r"Cannot find (?:module|package) '([^']{1,100})'")),  # Node
    ("module", re.compile(r"cannot load such file -- ([^ ]{1,100})")),  # Ruby
    ("module", re.compile(r"Can't locate ([^ ]{1,100}) in @INC")),  # Perl
    ("package", re.compile(r"there is no package called .([^’']{1,100})[’']")),  # R
    ("header", re.compile(r"fatal error: ([^ ]{1,100}): No such file or directory")),  # C and C++
)
_COMMAND = re.compile(r"([^ :]{1,100}): (?:command )?not found")
COMMAND_NOT_FOUND = 127
"""The exit code of a shell that does not find a command."""


def error(detail: str) -> str:
    """Return the beginning of a result's error message, on one line and without the number of the case."""
    case = _CASE.match(detail)
    return " ".join(detail[case.end() if case else 0 :][:WORDS].split())


class Missing(NamedTuple):
    """What a program wanted and did not find."""

    kind: str
    """`module`, `package`, `header` or `command`."""
    name: str


class Symptoms:
    """Counts what the results of a batch have in common."""

    def __init__(self) -> None:
        self.finished = 0
        self.missing: dict[Missing, Counter[str]] = {}
        """What images lack → image → number of samples."""
        self.limits: Counter[Verdict] = Counter()
        self.errors: Counter[str] = Counter()
        self.reasons: Counter[tuple[Verdict, str]] = Counter()
        """Why samples did not pass."""
        self.faults: Counter[str] = Counter()
        """The messages of our own failures (`sandbox_error`)."""

    def add(self, verdict: Verdict, exit_code: int | None, detail: str, image: str | None) -> None:
        """Count one result."""
        self.finished += 1
        if verdict is not Verdict.PASSED:
            _count(self.reasons, (verdict, error(detail)))
        if verdict in LIMITS:
            self.limits[verdict] += 1
        elif verdict is Verdict.SANDBOX_ERROR:
            _count(self.faults, error(detail))
        elif verdict not in ERRORS:
            return
        elif absent := _absent(exit_code, detail):
            if absent in self.missing or len(self.missing) < KEPT:
                self.missing.setdefault(absent, Counter())[image or ""] += 1
        else:
            _count(self.errors, error(detail))

    def failures(self) -> tuple[Failure, ...]:
        """Return the most frequent reasons why samples did not pass."""
        return tuple(Failure(*reason, count) for reason, count in self.reasons.most_common(REASONS))

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for each sign, the surest first."""
        every = f"{self.finished:,} samples"
        for lack, where in sorted(self.missing.items(), key=lambda item: -item[1].total()):
            if where.total() >= FEW and where.total() >= SHARE * self.finished:
                what = f"the {lack.kind} {lack.name} is missing from {_image(where)}"
                yield f"{where.total():,} of {every} failed because {what}."
        for verdict, count in self.limits.items():
            if self._nearly_all(count):
                yield f"{count:,} of {every} reached their {LIMITS[verdict]} limit, which may be too low."
        for words, count in self.errors.most_common(1):
            if self._nearly_all(count):
                yield f"{count:,} of {every} failed with the same error, perhaps because of the setup: {words}"
        for words, _ in self.faults.most_common(1):
            jobs = "1 job" if self.faults.total() == 1 else f"{self.faults.total():,} jobs"
            yield f"{jobs} could not be evaluated ({Verdict.SANDBOX_ERROR}). The most frequent reason: {words}"

    def _nearly_all(self, count: int) -> bool:
        return count >= SEVERAL and count >= NEARLY_ALL * self.finished


def _image(where: Counter[str]) -> str:
    (image, _), *others = where.most_common()
    name = f"the image {images.say(image)}" if image else "their image"
    return f"{name} and {len(others)} more" if others else name


def _absent(exit_code: int | None, detail: str) -> Missing | None:
    """Return what the program did not find, if its error message says so."""
    detail = detail[: 2 * WORDS]
    for kind, pattern in _MISSING:
        if found := pattern.search(detail):
            return Missing(kind, found[1])
    if exit_code == COMMAND_NOT_FOUND and (found := _COMMAND.search(detail)):
        return Missing("command", found[1])
    return None


def _count(counter: Counter[T], words: T) -> None:
    """Count these words, unless too many different ones are counted already."""
    if words in counter or len(counter) < KEPT:
        counter[words] += 1
