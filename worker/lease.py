"""The leases that this worker holds: claimed in one statement, and renewed until their jobs are over."""

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from evalpool.schemas.lease import Claim, Lease
from evalpool.schemas.store import Store
from evalpool.schemas.version import version
from evalpool.worker.ledger import Ledger

log = logging.getLogger("evalpool.lease")


class Stop(Enum):
    """Why a running job is stopped."""

    LOST = auto()
    """Its lease has expired, and another worker may have the job."""
    CANCELLED = auto()
    """The caller has cancelled the job."""
    PUT_BACK = auto()
    """This worker gives the job back to the queue."""


@dataclass
class Held:
    """A job that this worker holds."""

    lease: Lease
    task: asyncio.Task[None]
    """The task that runs the job."""
    since: float
    """When the task began, by the monotonic clock."""
    stopped: Stop | None = None
    """Why the task was cancelled, if it was."""

    def stop(self, reason: Stop) -> None:
        """Cancel the task. The first reason counts, as the task may be acting on it already."""
        self.stopped = self.stopped or reason
        self.task.cancel()


class Leases:
    """The leases of this worker, by job id."""

    def __init__(self, ledger: Ledger, worker: str, seconds: float) -> None:
        self._ledger, self._worker, self._seconds = ledger, worker, seconds
        self._held: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    async def claim(self, count: int, without: Collection[str]) -> Claim:
        """Claim up to `count` jobs whose turn it is, except those with an image in `without`."""
        return await self._ledger.call(
            Store.claim, count, self._worker, self._seconds, version=version(), without=without
        )

    def held(self) -> list[Held]:
        """Return every job that has begun and is not over."""
        return list(self._held.values())

    def hold(self, lease: Lease) -> None:
        """Renew this lease until `drop`. The task that runs the job calls this: a task that is cancelled before its
        first step would never drop the lease, and the job would be renewed for ever and never run."""
        task = asyncio.current_task()
        assert task is not None
        self._held[lease.job_id] = Held(lease, task, time.monotonic())

    def drop(self, lease: Lease) -> None:
        """Forget the lease of a job that is over. If the worker holds the job again already, that is another lease."""
        if lease.job_id in self._held and self._held[lease.job_id].lease is lease:
            del self._held[lease.job_id]

    def stop(self, reason: Stop) -> None:
        """Stop every job that this worker holds."""
        for held in self.held():
            held.stop(reason)

    def stopped(self, lease: Lease) -> Stop | None:
        """Why the job of this lease was stopped; `None` if it was not, or if the worker holds it again already."""
        held = self._held.get(lease.job_id)
        return held.stopped if held is not None and held.lease is lease else None

    async def keep(self) -> None:
        """Check all leases for ever, renew those that are due, and stop the jobs that this worker may no longer run."""
        while True:
            await asyncio.sleep(min(1.0, self._seconds / 3))
            if not self._held:
                continue
            attempts = {job_id: held.lease.attempt for job_id, held in self._held.items()}
            try:
                lost, cancelled = await self._ledger.at_once(Store.renew, attempts, self._worker, self._seconds)
            except Exception as error:  # the database is away: the leases may expire, and then the jobs run again
                log.warning("leases could not be renewed: %s", error, extra={"action": "renew_failed"})
                continue
            for job_ids, reason in ((lost, Stop.LOST), (cancelled, Stop.CANCELLED)):
                for job_id in job_ids & self._held.keys():
                    self._held[job_id].stop(reason)
