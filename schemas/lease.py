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
    """The image it runs in, in the form of `schemas.images`."""
    digest: str | None = None
    """The digest of all that decides its result, as its submitter knew it; NULL if nobody shares the result."""
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
