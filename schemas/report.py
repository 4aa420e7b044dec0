"""A batch summed up: verdicts, pass@k and how sure it is, and what the programs used."""

import random
from collections.abc import Iterable, Mapping
from math import comb
from typing import Any

from pydantic import BaseModel, ConfigDict

from schemas.verdict import Verdict

RESAMPLES = 1000
"""How often the problems are drawn anew for an interval."""
MOST_PROBLEMS = 2000
"""Problems up to which they are; with more, the mean's normal distribution is as good, and does not take minutes."""
NEAR = 0.8
"""Of a limit: a verdict this close to it might have been another one on another machine."""


class Spread(BaseModel):
    """Percentiles of one quantity over the scored jobs."""

    model_config = ConfigDict(frozen=True)

    median: float
    p95: float
    largest: float


class Score(BaseModel):
    """How many of some jobs passed."""

    model_config = ConfigDict(frozen=True)

    scored: int = 0
    passed: int = 0
    excluded: int = 0

    @property
    def rate(self) -> float:
        """The share of the scored ones that passed."""
        return self.passed / self.scored if self.scored else 0.0


class Report(BaseModel):
    """What a batch came to."""

    model_config = ConfigDict(frozen=True)

    batch_id: str
    name: str | None
    total: int
    finished: int
    verdicts: dict[Verdict, int]
    tasks: int
    """Problems with at least one scored sample."""
    problems: int | None = None
    """Problems there are in the benchmark, where that is known."""
    samples_per_task: tuple[int, int] = (0, 0)
    """Scored samples of the problem that has fewest, and of the one that has most."""
    excluded: int
    """Finished jobs without a score: `sandbox_error` and `cancelled`."""
    pass_at_k: dict[int, float]
    """Only the k for which every problem has at least k scored samples."""
    intervals: dict[int, tuple[float, float]] = {}
    """For each such k, where the value would lie for 95 of 100 draws of as many problems."""
    by_task: dict[str, Score] = {}
    """Those with the lowest scores, where there are very many."""
    by_label: dict[str, dict[str, Score]] = {}
    """Label → value → score, for labels with few values."""
    near_limit: int = 0
    """Verdicts within 20 % of a limit that did not decide them."""
    rerun: int = 0
    """Jobs that had to be run again alone, since others had taken their CPU time."""
    deduplicated: int = 0
    """Jobs that share the result of an identical one."""
    cached: int = 0
    """Of those, jobs whose result comes from an earlier batch."""
    repeats: int = 1
    """How often each sample was run; the first run counts."""
    flaky: tuple[str, ...] = ()
    """Jobs whose repeats did not all get the same verdict."""
    seconds: float
    """From submission to the last result."""
    cpu_seconds: Spread
    wall_seconds: Spread
    peak_memory_bytes: Spread
    made: dict[str, Any] = {}
    """How it was made: format, limits, comparators, machines, images."""

    @property
    def jobs_per_second(self) -> float:
        """Over the whole batch, waiting included."""
        return self.finished / self.seconds if self.seconds > 0 else 0.0


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate for one problem: 1 − C(n−c, k) / C(n, k)."""
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def mean_pass_at_k(tasks: Mapping[tuple[int, int], int], ks: Iterable[int]) -> dict[int, float]:
    """The mean over problems, given as how many have so many (scored, passed); a k that some problem is too small for
    is left out."""
    smallest, count = min((n for n, _ in tasks), default=0), sum(tasks.values())
    ks = [k for k in ks if 1 <= k <= smallest]
    return {k: sum(times * pass_at_k(n, c, k) for (n, c), times in tasks.items()) / count for k in ks}


def interval(values: Mapping[float, int]) -> tuple[float, float]:
    """Where the mean of as many problems, drawn anew from these (value → how many have it), lies in 95 of 100 cases.
    The same values give the same interval: the draws are not left to chance."""
    count = sum(values.values())
    mean = sum(value * times for value, times in values.items()) / count
    if count > MOST_PROBLEMS:
        margin = 1.96 * (sum(times * (value - mean) ** 2 for value, times in values.items()) / count / count) ** 0.5
        return max(0.0, mean - margin), min(1.0, mean + margin)
    draw = random.Random(count)
    choices, weights = list(values), list(values.values())
    means = sorted(sum(draw.choices(choices, weights, k=count)) / count for _ in range(RESAMPLES))
    return means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))]


def spread(values: Iterable[float]) -> Spread:
    """Median, 95th percentile (nearest rank) and maximum."""
    ordered = sorted(values)
    if not ordered:
        return Spread(median=0, p95=0, largest=0)
    rank = len(ordered) - 1
    return Spread(median=ordered[rank // 2], p95=ordered[round(rank * 0.95)], largest=ordered[-1])
