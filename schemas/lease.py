"""A worker's claim on a job, and what comes of claiming and renewing."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from evalpool.schemas.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A worker's claim on one job, with everything that the worker needs to run it."""

    job_id: str
    batch_id: str
    spec: JobSpec
    image: str | None = None
    """The image of the job, in the form of `schemas.images`."""
    digest: str | None = None
    """The digest of everything that decides the result, as the submitter knew it; `None` if nobody shares the
    result."""
    attempt: int
    created_at: float
    started_at: float
    """The start of this attempt by the database's clock, in seconds since 1970."""
    failures: tuple[str, ...] = ()
    """What went wrong with us in earlier attempts, a line each."""
    claimed: float = field(default_factory=time.monotonic)
    """The time of the claim by this process's monotonic clock."""

    @property
    def now(self) -> float:
        """The present time by the database's clock, computed without asking the database."""
        return self.started_at + time.monotonic() - self.claimed


@dataclass(frozen=True)
class Claim:
    """The result of a claim."""

    leases: list[Lease]
    unreadable: dict[str, str]
    """Job id → reason: jobs of a newer version, which were put back for workers that can read them."""
    passed_over: bool = False
    """Whether fewer jobs than asked for were found while others were locked by another transaction."""

    @property
    def count(self) -> int:
        """How many jobs were found, the unreadable ones included."""
        return len(self.leases) + len(self.unreadable)


class Renewal(NamedTuple):
    """The result of a renewal."""

    lost: set[str]
    """Ids of the jobs that do not belong to the worker any more."""
    cancelled: set[str]
    """Ids of the jobs that the worker still holds and whose caller has cancelled them."""
