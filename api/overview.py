"""What one pass over the results of a batch leaves for its page: a million may go by, a few hundred are kept."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from zlib import crc32

from api import plots
from schemas.result import Result
from schemas.verdict import Verdict

FAILURES = 300
"""Samples that are shown with their programs; all are in results.jsonl."""
TOP = 10
"""Samples in the tables of the slowest and the hungriest."""
OUTPUT, NAME = 2_000, 120
"""Characters that are shown of any text but a program, and of a name."""
BUCKETS = 1 << 16
"""Tasks that are told apart when the failures to show are chosen."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the page shows of a result, whose own texts may be large."""

    job_id: str
    task: str
    name: str
    verdict: Verdict
    detail: str
    cpu_seconds: float
    peak_memory_bytes: int
    case: int | None
    """The one that failed first."""
    stdout: str
    stderr: str

    @classmethod
    def of(cls, result: Result) -> "Sample":
        """Cut to what is shown: the beginning of what is compared, and the end of what is only read."""
        case = next((case.index for case in result.cases if case.verdict is not Verdict.PASSED), None)
        return cls(
            result.job_id,
            "" if result.task_id is None else short(result.task_id),
            result.job_id if result.sample_id is None else short(result.sample_id),
            result.verdict,
            head(result.detail, OUTPUT),
            result.metrics.cpu_seconds,
            result.metrics.peak_memory_bytes,
            case,
            tail(result.stdout) if case is None else head(result.stdout, OUTPUT),
            tail(result.stderr),
        )


class Top:
    """The samples with the largest keys, no two of which are equal."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.heap: list[tuple[tuple[float, int], Sample]] = []

    def offer(self, key: tuple[float, int], result: Result) -> None:
        """Keep it if it is among them."""
        if len(self.heap) < self.size:
            heapq.heappush(self.heap, (key, Sample.of(result)))
        elif key > self.heap[0][0]:
            heapq.heapreplace(self.heap, (key, Sample.of(result)))

    def best(self) -> list[tuple[tuple[float, int], Sample]]:
        """From the largest key down."""
        return sorted(self.heap, reverse=True)


class Overview:
    """What one pass over the results leaves."""

    def __init__(self, results: Iterator[Result]) -> None:
        self.cpu = plots.Histogram("CPU time", plots.SECONDS)
        self.memory = plots.Histogram("peak memory", plots.MEBIBYTES)
        self.slowest, self.hungriest = Top(TOP), Top(TOP)
        self.last: datetime | None = None
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
        self.slowest.offer((used.cpu_seconds, order), result)
        self.hungriest.offer((used.peak_memory_bytes, order), result)

    def _fail(self, order: int, result: Result) -> None:
        """Of each verdict, the first failure of every task goes before the second of any."""
        task = result.job_id if result.task_id is None else str(result.task_id)
        bucket = result.verdict, crc32(task.encode(errors="replace")) % BUCKETS
        self._failures[result.verdict].offer((-self._turns[bucket], order), result)
        self._turns[bucket] += 1

    def failures(self) -> list[Sample]:
        """As many of each verdict as there is room for, in the order of the batch."""
        placed = [
            (place, order, sample)
            for top in self._failures.values()
            for place, ((_, order), sample) in enumerate(top.best())
        ]
        chosen = sorted(placed, key=lambda each: each[0])[:FAILURES]
        return [sample for _, _, sample in sorted(chosen, key=lambda each: -each[1])]


def short(name: object) -> str:
    """A name, cut."""
    text = str(name)
    return text if len(text) <= NAME else text[:NAME] + "…"


def head(text: str, size: int) -> str:
    """The beginning of a text."""
    return text if len(text) <= size else f"{text[:size]}\n… {len(text) - size:,} more characters"


def tail(text: str) -> str:
    """Its end."""
    return text if len(text) <= OUTPUT else f"{len(text) - OUTPUT:,} more characters …\n{text[-OUTPUT:]}"
