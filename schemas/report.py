"""The report on a batch: its verdicts, pass@k with confidence intervals, and what the programs used."""

import random
from collections.abc import Iterable, Mapping
from math import comb
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from evalpool.schemas.verdict import Verdict

RESAMPLES = 1000
"""How often the problems are resampled (bootstrap) for a confidence interval."""
MOST_PROBLEMS = 2000
"""The most problems that are resampled. With more, the normal distribution of the mean is as good, and much faster."""
NEAR = 0.8
"""The share of a limit from which on a verdict is near it, and might be another one on another machine."""


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    """The lower bound."""
    high: float
    """The upper bound."""


class Spread(BaseModel):
    """Percentiles of one quantity over all scored jobs."""

    model_config = ConfigDict(frozen=True)

    median: float
    """Half of the values are at most this."""
    p95: float
    """95 of 100 values are at most this."""
    largest: float
    """The largest value."""


class Score(BaseModel):
    """How many jobs of a group passed."""

    model_config = ConfigDict(frozen=True)

    scored: int = 0
    """Results that count."""
    passed: int = 0
    """Those of them that passed."""
    excluded: int = 0
    """Results that do not count: cancelled, or our own failure."""

    @property
    def rate(self) -> float:
        """The share of the scored jobs that passed; 0 if no job is scored."""
        return self.passed / self.scored if self.scored else 0.0


class Failure(NamedTuple):
    """How many samples got the same verdict for the same reason."""

    verdict: Verdict
    """Their verdict."""
    reason: str
    """The beginning of their `detail`, on one line and without the number of the case."""
    samples: int
    """How many they are."""


class Report(BaseModel):
    """The report on a batch."""

    model_config = ConfigDict(frozen=True)

    batch_id: str
    """The id of the batch."""
    name: str | None
    """The name of the batch."""
    total: int
    """All jobs of the batch."""
    finished: int
    """Jobs that have a result."""
    verdicts: dict[Verdict, int]
    """How many jobs got which verdict."""
    tasks: int
    """Problems with at least one scored sample."""
    problems: int | None = None
    """The number of problems in the benchmark, if it is known."""
    samples_per_task: tuple[int, int] = (0, 0)
    """Scored samples of the problem with the fewest, and of the problem with the most."""
    excluded: int
    """Jobs whose verdict is not scored: `sandbox_error` and `cancelled`."""
    pass_at_k: dict[int, float]
    """k → pass@k, only for each k of which every problem has at least k scored samples."""
    intervals: dict[int, tuple[float, float]] = {}
    """k → the 95 % confidence interval of pass@k over the choice of problems."""
    by_task: dict[str, Score] = {}
    """Problem → score; only the lowest scores if there are very many problems."""
    by_label: dict[str, dict[str, Score]] = {}
    """Label → value → score, for labels with few values."""
    warnings: tuple[str, ...] = ()
    """Signs that the setup is at fault and not the programs, a sentence each."""
    failures: tuple[Failure, ...] = ()
    """The most frequent reasons why samples did not pass."""
    near_limit: int = 0
    """Jobs that came within 20 % of a limit that did not decide their verdict."""
    rerun: int = 0
    """Jobs that were run again, alone, since other jobs had taken their CPU time."""
    deduplicated: int = 0
    """Jobs that share the result of an identical job."""
    cached: int = 0
    """Deduplicated jobs whose result comes from an earlier batch."""
    repeats: int = 1
    """How often each sample was run. The first run is scored."""
    flaky: tuple[str, ...] = ()
    """The ids of jobs whose repeated runs did not all get the same verdict."""
    seconds: float
    """Seconds from the submission to the last result."""
    cpu_seconds: Spread
    """CPU time of the programs, in seconds."""
    wall_seconds: Spread
    """Wall time of the programs, in seconds."""
    peak_memory_bytes: Spread
    """Peak memory of the programs, in bytes."""
    made: dict[str, Any] = {}
    """How the batch was made: format, limits, comparators, machines, images."""

    @property
    def jobs_per_second(self) -> float:
        """The throughput over the whole batch, waiting included."""
        return self.finished / self.seconds if self.seconds > 0 else 0.0


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate of pass@k for one problem: 1 − C(n−c, k) / C(n, k)."""
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def mean_pass_at_k(tasks: Mapping[tuple[int, int], int], ks: Iterable[int]) -> dict[int, float]:
    """k → the mean of pass@k over all problems. `tasks` maps (scored, passed) samples to the number of problems that
    have them. A k that is larger than the scored samples of some problem is left out."""
    smallest, count = min((n for n, _ in tasks), default=0), sum(tasks.values())
    ks = [k for k in ks if 1 <= k <= smallest]
    return {k: sum(times * pass_at_k(n, c, k) for (n, c), times in tasks.items()) / count for k in ks}


def interval(values: Mapping[float, int]) -> Interval:
    """The 95 % confidence interval of the mean over problems, by resampling. `values` maps each value to the number of
    problems that have it. The same values always give the same interval, since the random generator is seeded."""
    count = sum(values.values())
    mean = sum(value * times for value, times in values.items()) / count
    if count > MOST_PROBLEMS:
        margin = 1.96 * (sum(times * (value - mean) ** 2 for value, times in values.items()) / count / count) ** 0.5
        return Interval(max(0.0, mean - margin), min(1.0, mean + margin))
    draw = random.Random(count)
    choices, weights = list(values), list(values.values())
    means = sorted(sum(draw.choices(choices, weights, k=count)) / count for _ in range(RESAMPLES))
    return Interval(means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))])


def spread(values: Iterable[float]) -> Spread:
    """The median, the 95th percentile (nearest rank) and the maximum; all 0 if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return Spread(median=0, p95=0, largest=0)
    rank = len(ordered) - 1
    return Spread(median=ordered[rank // 2], p95=ordered[round(rank * 0.95)], largest=ordered[-1])
