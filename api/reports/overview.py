"""Collects what the report page shows in one pass over the results: of a million, a few hundred are kept."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from zlib import crc32

from evalpool.api.reports import plots
from evalpool.api.reports.symptoms import KEPT, error
from evalpool.schemas.result import Result
from evalpool.schemas.verdict import Verdict

FAILURES = 300
"""Failed samples that are shown with their programs. All samples are in results.jsonl."""
TOP = 10
"""How many samples are in the table of the slowest ones, and in the table of those that used the most memory."""
OUTPUT, NAME = 2_000, 120
"""Characters that are shown of an output or a message, and of a name."""
BUCKETS = 1 << 16
"""How many buckets tasks are hashed into when the failures to show are chosen."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The part of a result that the page shows. The texts of the result itself may be large."""

    job_id: str
    task: str
    name: str
    verdict: Verdict
    detail: str
    wall_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    case: int | None
    """The index of the first case that failed."""
    stdout: str
    stderr: str

    @classmethod
    def of(cls, result: Result) -> "Sample":
        """Return a result with its texts cut: output that is compared with the expected one keeps its beginning, other
        output its end."""
        case = next((case.index for case in result.cases if case.verdict is not Verdict.PASSED), None)
        return cls(
            result.job_id,
            "" if result.task_id is None else short(result.task_id),
            result.job_id if result.sample_id is None else short(result.sample_id),
            result.verdict,
            head(result.detail, OUTPUT),
            result.metrics.wall_seconds,
            result.metrics.cpu_seconds,
            result.metrics.peak_memory_bytes,
            case,
            tail(result.stdout) if case is None else head(result.stdout, OUTPUT),
            tail(result.stderr),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Failures with the same verdict and the same error."""

    verdict: Verdict
    error: str
    count: int
    """The number of such failures, of which only some may be in `samples`."""
    samples: list[Sample]


class Key(NamedTuple):
    """The rank of a sample. No two samples have the same key, since `order` is different for each."""

    value: float
    order: int
    """The number of the result in the batch, negated: of equal values, the earlier one ranks higher."""


class Ranked(NamedTuple):
    """A sample and its rank."""

    key: Key
    sample: Sample


class Top:
    """Keeps the samples with the largest keys."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.heap: list[Ranked] = []

    def offer(self, key: Key, result: Result) -> None:
        """Keep the result if its key is among the largest."""
        if len(self.heap) < self.size:
            heapq.heappush(self.heap, Ranked(key, Sample.of(result)))
        elif key > self.heap[0].key:
            heapq.heapreplace(self.heap, Ranked(key, Sample.of(result)))

    def best(self) -> list[Ranked]:
        """Return the samples from the largest key down."""
        return sorted(self.heap, reverse=True)


class Overview:
    """What the page shows of the results, collected in one pass."""

    def __init__(self, results: Iterator[Result]) -> None:
        self.cpu = plots.Histogram("CPU time", plots.SECONDS)
        self.memory = plots.Histogram("peak memory", plots.MEBIBYTES)
        self.slowest, self.hungriest = Top(TOP), Top(TOP)
        self.last: datetime | None = None
        self._errors: Counter[tuple[Verdict, str]] = Counter()
        self._failures: defaultdict[Verdict, Top] = defaultdict(lambda: Top(FAILURES))
        self._turns: Counter[tuple[Verdict, int]] = Counter()
        for seq, result in enumerate(results):
            self.last = result.finished_at if self.last is None else max(self.last, result.finished_at)
            if result.verdict.scored:
                self._measure(-seq, result)
            if result.verdict not in (Verdict.PASSED, Verdict.CANCELLED):
                self._fail(-seq, result)

    def _measure(self, order: int, result: Result) -> None:
        used = result.metrics
        self.cpu.add(used.cpu_seconds, passed=result.passed)
        self.memory.add(used.peak_memory_bytes / (1 << 20), passed=result.passed)
        self.slowest.offer(Key(max(used.cpu_seconds, used.wall_seconds), order), result)
        self.hungriest.offer(Key(used.peak_memory_bytes, order), result)

    def _fail(self, order: int, result: Result) -> None:
        """Rank a failure: for each verdict, the first failures of all tasks come before second failures."""
        task = result.job_id if result.task_id is None else str(result.task_id)
        bucket = result.verdict, crc32(task.encode(errors="replace")) % BUCKETS
        self._failures[result.verdict].offer(Key(-self._turns[bucket], order), result)
        self._turns[bucket] += 1
        kind = result.verdict, error(result.detail)
        if kind in self._errors or len(self._errors) < KEPT:
            self._errors[kind] += 1

    def groups(self) -> list[Group]:
        """Return the failures to show, grouped by error. The most frequent errors come first; errors that occur once
        are in the order of the batch."""
        alike: dict[tuple[Verdict, str], list[Sample]] = {}
        for sample in self._chosen():
            alike.setdefault((sample.verdict, error(sample.detail)), []).append(sample)
        made = [Group(*kind, max(self._errors[kind], len(some)), some) for kind, some in alike.items()]
        return sorted(made, key=lambda group: -group.count)

    def _chosen(self) -> list[Sample]:
        """Return as many failures of each verdict as there is room for, in the order of the batch."""
        placed = [(place, ranked) for top in self._failures.values() for place, ranked in enumerate(top.best())]
        chosen = sorted(placed, key=lambda each: each[0])[:FAILURES]
        return [ranked.sample for _, ranked in sorted(chosen, key=lambda each: -each[1].key.order)]


def short(name: object) -> str:
    """Return a name, cut to `NAME` characters."""
    text = str(name)
    return text if len(text) <= NAME else text[:NAME] + "…"


def head(text: str, size: int) -> str:
    """Return the beginning of a text, with a note on what is left out."""
    return text if len(text) <= size else f"{text[:size]}\n… {len(text) - size:,} more characters"


def tail(text: str) -> str:
    """Return the end of a text, with a note on what is left out."""
    return text if len(text) <= OUTPUT else f"{len(text) - OUTPUT:,} more characters …\n{text[-OUTPUT:]}"
