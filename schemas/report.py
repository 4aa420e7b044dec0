"""A batch summed up: verdicts, pass@k, and what the programs used."""

from collections.abc import Iterable, Mapping, Sequence
from math import comb

from pydantic import BaseModel, ConfigDict

from schemas.verdict import Verdict


class Spread(BaseModel):
    """Percentiles of one quantity over the scored jobs."""

    model_config = ConfigDict(frozen=True)

    median: float
    p95: float
    largest: float


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
    excluded: int
    """Finished jobs without a score: `sandbox_error` and `cancelled`."""
    pass_at_k: dict[int, float]
    """Only the k for which every problem has at least k scored samples."""
    seconds: float
    """From submission to the last result."""
    cpu_seconds: Spread
    wall_seconds: Spread
    peak_memory_bytes: Spread

    @property
    def jobs_per_second(self) -> float:
        """Over the whole batch, waiting included."""
        return self.finished / self.seconds if self.seconds > 0 else 0.0


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate for one problem: 1 − C(n−c, k) / C(n, k)."""
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def mean_pass_at_k(tasks: Mapping[object, tuple[int, int]], ks: Iterable[int]) -> dict[int, float]:
    """The mean over problems, each given as (scored, passed); a k that some problem is too small for is left out."""
    if not tasks:
        return {}
    smallest = min(samples for samples, _ in tasks.values())
    return {k: sum(pass_at_k(n, c, k) for n, c in tasks.values()) / len(tasks) for k in ks if 1 <= k <= smallest}


def spread(values: Sequence[float]) -> Spread:
    """Median, 95th percentile (nearest rank) and maximum."""
    if not values:
        return Spread(median=0, p95=0, largest=0)
    ordered = sorted(values)
    rank = len(ordered) - 1
    return Spread(median=ordered[rank // 2], p95=ordered[round(rank * 0.95)], largest=ordered[-1])
