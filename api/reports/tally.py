"""Adds up the results of a batch in one pass. Of each of a million results, only three numbers are kept."""

import json
from array import array
from collections import Counter
from heapq import nsmallest
from typing import Any, NamedTuple

from evalpool.api.reports.symptoms import Symptoms
from evalpool.schemas.report import NEAR, Score
from evalpool.schemas.rows import batch_of
from evalpool.schemas.verdict import Verdict

VALUES, NAMES = 20, 50
"""Labels with more values than this are not used for grouping, and labels beyond so many are ignored."""
TASKS = 10_000
"""Problems whose scores are in a report, at most."""
LIMITS = (Verdict.TIME_LIMIT, Verdict.MEMORY_LIMIT, Verdict.OUTPUT_LIMIT)


class Count(NamedTuple):
    """How many samples were scored, passed, and excluded from the scores."""

    scored: int = 0
    passed: int = 0
    excluded: int = 0

    def plus(self, other: "Count") -> "Count":
        """Return the sum."""
        return Count(self.scored + other.scored, self.passed + other.passed, self.excluded + other.excluded)

    @property
    def score(self) -> Score:
        """The same numbers as the report has them."""
        return Score(scored=self.scored, passed=self.passed, excluded=self.excluded)


NONE = Count()


class Tally:
    """Takes the rows of `Store.measures` in the order of submission."""

    def __init__(self, samples: int, repeats: int = 1) -> None:
        self.samples, self.repeats = samples, repeats
        self.finished, self.last = 0, 0.0
        self.verdicts: Counter[Verdict] = Counter()
        self.tasks: dict[str, Count] = {}
        self.single: Counter[Count] = Counter()
        """Jobs without a task, each of which is a problem of its own without a name."""
        self.labels: dict[str, dict[str, Count]] = {}
        self.near_limit = self.rerun = self.deduplicated = self.cached = 0
        self.cpu, self.wall, self.memory = array("d"), array("d"), array("d")
        self.first: dict[int, tuple[str, Verdict]] = {}
        self.flaky: set[str] = set()
        self.symptoms = Symptoms()
        self.made: dict[str, Counter[str]] = {"workers": Counter(), "images": Counter(), "comparators": Counter()}

    def add(self, row: Any) -> None:
        """Add one result. The first run of each sample counts, and its repeats are compared with it."""
        if row.seq < self.samples:
            self._count(row)
        else:
            self._compare(row, row.seq % self.samples)

    def problems(self) -> Counter[tuple[int, int]]:
        """Return how many problems have so many (scored, passed) samples, without those that have no scored sample."""
        pairs: Counter[tuple[int, int]] = Counter()
        for (scored, passed, _), times in (self.single + Counter(self.tasks.values())).items():
            if scored:
                pairs[scored, passed] += times
        return pairs

    def by_task(self) -> dict[str, Score]:
        """Return the lowest scores by the names of their tasks. The names 7 and "7" differ only if both occur."""
        lowest = nsmallest(TASKS, self.tasks.items(), key=lambda task: task[1].passed / (task[1].scored or 1))
        names = Counter(str(json.loads(task)) for task, _ in lowest)
        return {task if names[name := str(json.loads(task))] > 1 else name: count.score for task, count in lowest}

    def by_label(self) -> dict[str, dict[str, Score]]:
        """Return the scores by label and value, for labels that form groups."""
        return {
            name: {value: count.score for value, count in values.items()}
            for name, values in self.labels.items()
            if 1 < len(values) <= VALUES
        }

    def _count(self, row: Any) -> None:
        verdict = Verdict(row.verdict)
        self.finished += 1
        self.last = max(self.last, row.finished_at)
        self.verdicts[verdict] += 1
        self.symptoms.add(verdict, row.exit_code, row.detail, row.image)
        one = Count(int(verdict.scored), int(verdict is Verdict.PASSED), int(not verdict.scored))
        if row.task_id is None:
            self.single[one] += 1
        else:
            self.tasks[row.task_id] = self.tasks.get(row.task_id, NONE).plus(one)
        if row.labels:
            self._label(json.loads(row.labels), one)
        self.rerun += row.rerun
        if row.shared_with is not None:
            self.deduplicated += 1
            self.cached += batch_of(row.shared_with) != batch_of(row.job_id)
        for name, value in (("workers", row.worker), ("images", row.image_digest), ("comparators", row.comparator)):
            if value is not None:
                self.made[name][value] += 1
        if verdict.scored:
            self.near_limit += row.limit_share >= NEAR and verdict not in LIMITS
            self.cpu.append(row.cpu_seconds)
            self.wall.append(row.wall_seconds)
            self.memory.append(row.peak_memory_bytes)
        if self.repeats > 1:
            self.first[row.seq] = (row.job_id, verdict)

    def _label(self, labels: dict[str, Any], one: Count) -> None:
        for name, value in labels.items():
            values = self.labels.get(name, {}) if len(self.labels) >= NAMES else self.labels.setdefault(name, {})
            if len(values) <= VALUES or str(value) in values:
                values[str(value)] = values.get(str(value), NONE).plus(one)

    def _compare(self, row: Any, seq: int) -> None:
        self.last = max(self.last, row.finished_at)
        job_id, verdict = self.first.get(seq, ("", Verdict.SANDBOX_ERROR))
        other = Verdict(row.verdict)  # only verdicts on the program can disagree
        if verdict.scored and other.scored and other is not verdict:
            self.flaky.add(job_id)
