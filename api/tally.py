"""What is kept of a batch's results while they pass by, a million if need be: counts, and three numbers of each."""

import json
from array import array
from collections import Counter
from heapq import nsmallest
from typing import Any

from schemas.report import NEAR, Score
from schemas.rows import batch_of
from schemas.verdict import Verdict

VALUES, NAMES = 20, 50
"""A label with more values than this is no grouping; and labels beyond so many are not looked at."""
TASKS = 10_000
"""Problems whose scores a report names one by one."""
Count = tuple[int, int, int]
"""Scored, passed, excluded."""
NONE: Count = (0, 0, 0)
LIMITS = (Verdict.TIME_LIMIT, Verdict.MEMORY_LIMIT, Verdict.OUTPUT_LIMIT)


class Tally:
    """Takes the rows of `Store.measures` in the order of submission."""

    def __init__(self, samples: int, repeats: int = 1) -> None:
        self.samples, self.repeats = samples, repeats
        self.finished, self.last = 0, 0.0
        self.verdicts: Counter[Verdict] = Counter()
        self.tasks: dict[str, Count] = {}
        self.single: Counter[Count] = Counter()
        """Jobs without a task are problems of their own; they have no name, so it is enough to count them."""
        self.labels: dict[str, dict[str, Count]] = {}
        self.near_limit = self.rerun = self.deduplicated = self.cached = 0
        self.cpu, self.wall, self.memory = array("d"), array("d"), array("d")
        self.first: dict[int, tuple[str, Verdict]] = {}
        self.flaky: set[str] = set()
        self.made: dict[str, Counter[str]] = {"workers": Counter(), "images": Counter(), "comparators": Counter()}

    def add(self, row: Any) -> None:
        """One result; the first run of each sample counts, and its repeats are compared with it."""
        if row.seq < self.samples:
            self._count(row)
        else:
            self._compare(row, row.seq % self.samples)

    def problems(self) -> Counter[tuple[int, int]]:
        """How many problems have so many (scored, passed) samples; those without a scored one are left out."""
        pairs: Counter[tuple[int, int]] = Counter()
        for (scored, passed, _), times in (self.single + Counter(self.tasks.values())).items():
            if scored:
                pairs[scored, passed] += times
        return pairs

    def by_task(self) -> dict[str, Score]:
        """The lowest scores by the names of their tasks, for people: 7 and "7" stay apart only where there are both."""
        lowest = nsmallest(TASKS, self.tasks.items(), key=lambda task: task[1][1] / (task[1][0] or 1))
        names = Counter(str(json.loads(task)) for task, _ in lowest)
        return {task if names[name := str(json.loads(task))] > 1 else name: _score(count) for task, count in lowest}

    def by_label(self) -> dict[str, dict[str, Score]]:
        """The scores of labels that group."""
        return {
            name: {value: _score(count) for value, count in values.items()}
            for name, values in self.labels.items()
            if 1 < len(values) <= VALUES
        }

    def _count(self, row: Any) -> None:
        verdict = Verdict(row.verdict)
        self.finished += 1
        self.last = max(self.last, row.finished_at)
        self.verdicts[verdict] += 1
        one = int(verdict.scored), int(verdict is Verdict.PASSED), int(not verdict.scored)
        if row.task_id is None:
            self.single[one] += 1
        else:
            self.tasks[row.task_id] = _plus(self.tasks.get(row.task_id, NONE), one)
        for name, value in json.loads(row.labels).items() if row.labels else ():
            values = self.labels.get(name, {}) if len(self.labels) >= NAMES else self.labels.setdefault(name, {})
            if len(values) <= VALUES or str(value) in values:
                values[str(value)] = _plus(values.get(str(value), NONE), one)
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

    def _compare(self, row: Any, seq: int) -> None:
        self.last = max(self.last, row.finished_at)
        job_id, verdict = self.first.get(seq, ("", Verdict.SANDBOX_ERROR))
        other = Verdict(row.verdict)  # only what was said about the program can disagree
        if verdict.scored and other.scored and other is not verdict:
            self.flaky.add(job_id)


def _plus(count: Count, one: Count) -> Count:
    return count[0] + one[0], count[1] + one[1], count[2] + one[2]


def _score(count: Count) -> Score:
    return Score(scored=count[0], passed=count[1], excluded=count[2])
