"""What is kept of a batch's results while they pass by, a million if need be: counts, and three numbers of each."""

import json
from array import array
from collections import Counter
from typing import Any

from schemas.report import NEAR, Score
from schemas.rows import batch_of
from schemas.verdict import Verdict

VALUES = 20
"""A label with more values than this is no grouping."""
LIMITS = (Verdict.TIME_LIMIT, Verdict.MEMORY_LIMIT, Verdict.OUTPUT_LIMIT)


class Tally:
    """Takes the rows of `Store.measures` in the order of submission."""

    def __init__(self, samples: int, repeats: int = 1) -> None:
        self.samples, self.repeats = samples, repeats
        self.finished, self.last = 0, 0.0
        self.verdicts: Counter[Verdict] = Counter()
        self.tasks: dict[str, Score] = {}
        self.labels: dict[str, dict[str, Score]] = {}
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

    def named_tasks(self) -> dict[str, Score]:
        """The scores by the names of the tasks, for people: 7 and "7" stay apart only where there are both."""
        names = Counter(str(json.loads(task)) for task in self.tasks)
        return {task if names[name := str(json.loads(task))] > 1 else name: score for task, score in self.tasks.items()}

    def _count(self, row: Any) -> None:
        verdict = Verdict(row.verdict)
        self.finished += 1
        self.last = max(self.last, row.finished_at)
        self.verdicts[verdict] += 1
        # a job without a task is a problem of its own
        task = json.dumps(f"job {row.seq}") if row.task_id is None else row.task_id
        self.tasks[task] = self.tasks.get(task, Score()).with_one(verdict)
        for name, value in json.loads(row.labels).items() if row.labels else ():
            values = self.labels.setdefault(name, {})
            if len(values) <= VALUES or str(value) in values:
                values[str(value)] = values.get(str(value), Score()).with_one(verdict)
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
