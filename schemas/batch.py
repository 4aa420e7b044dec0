"""Jobs submitted together, and how far they have come."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from schemas.verdict import Verdict


class Progress(BaseModel):
    """How many jobs of a batch are in which state, counted from the rows."""

    model_config = ConfigDict(frozen=True)

    total: int
    queued: int = 0
    running: int = 0
    finished: int = 0
    cancelled: int = 0
    verdicts: dict[Verdict, int] = {}

    @property
    def done(self) -> int:
        """Jobs with a final state."""
        return self.finished + self.cancelled

    @property
    def complete(self) -> bool:
        """Whether every job has its result."""
        return self.done == self.total


class Batch(BaseModel):
    """The row of a batch."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str | None
    idempotency_key: str | None
    total: int
    created_at: datetime
    cancelled: bool
    about: dict[str, Any] = {}
    """How it was made: format, options, number of problems."""
