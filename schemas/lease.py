"""A worker's claim on a job."""

import time
from dataclasses import dataclass, field

from schemas.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A worker's claim on one job, and all it needs to run it."""

    job_id: str
    batch_id: str
    spec: JobSpec
    image: str | None = None
    """What it runs in, as `schemas.images` writes it."""
    digest: str | None = None
    """Of all that decided its result when it was submitted; whoever has the same may get it."""
    attempt: int
    created_at: float
    started_at: float
    """By the database's clock."""
    failures: tuple[str, ...] = ()
    """What went wrong with us before."""
    claimed: float = field(default_factory=time.monotonic)
    """By this process's own clock: what passes from here on is added to `started_at`."""

    @property
    def now(self) -> float:
        """The database's clock, without asking it again."""
        return self.started_at + time.monotonic() - self.claimed
