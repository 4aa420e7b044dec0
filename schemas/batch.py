"""A batch, that is, jobs submitted together, and its progress."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from evalpool.schemas.verdict import Verdict


class Progress(BaseModel):
    """How many jobs of a batch are in which state, counted from the rows."""

    model_config = ConfigDict(frozen=True)

    total: int
    """All jobs of the batch."""
    queued: int = 0
    """Jobs that wait, including those that a worker has claimed in advance."""
    running: int = 0
    """Jobs in a slot of a worker. No worker counts with more jobs than it has slots."""
    finished: int = 0
    """Jobs that have a result and were not cancelled."""
    cancelled: int = 0
    """Jobs that were cancelled."""
    verdicts: dict[Verdict, int] = {}
    """How many jobs got which verdict."""

    @property
    def done(self) -> int:
        """How many jobs have a final state."""
        return self.finished + self.cancelled

    @property
    def complete(self) -> bool:
        """Whether every job has its result."""
        return self.done == self.total


class Batch(BaseModel):
    """What is known about a batch itself."""

    model_config = ConfigDict(frozen=True)

    id: str
    """The id of the batch."""
    name: str | None
    """The name that the submitter gave it."""
    idempotency_key: str | None
    """The key under which a repeated submission finds this batch."""
    total: int
    """How many jobs the batch has."""
    created_at: datetime
    """When it was submitted."""
    cancelled: bool
    """Whether it was cancelled."""
    about: dict[str, Any] = {}
    """How the batch was made: format, options, number of problems."""
