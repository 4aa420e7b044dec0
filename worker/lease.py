"""The leases this worker holds: claimed in one statement, renewed while the jobs run, given up when they are over."""

import asyncio
import logging
from collections.abc import Collection

from schemas.lease import Lease
from schemas.store import Claim, Store
from schemas.version import version
from worker.ledger import Ledger

log = logging.getLogger("evalpool.lease")

LOST, CANCELLED, PUT_BACK = "lease lost", "cancelled by its caller", "put back"
"""Why a running job is stopped; the message of its cancellation."""


class Leases:
    """Job id → its lease and the task that runs it."""

    def __init__(self, ledger: Ledger, worker: str, seconds: float) -> None:
        self._ledger, self._worker, self._seconds = ledger, worker, seconds
        self._held: dict[str, tuple[Lease, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    async def claim(self, count: int, without: Collection[str]) -> Claim:
        """Claim up to `count` jobs whose turn it is, except those with an image in `without`."""
        return await self._ledger.call(
            Store.claim, count, self._worker, self._seconds, version=version(), without=without
        )

    def held(self) -> list[tuple[Lease, "asyncio.Task[None]"]]:
        """Every lease, with the task that runs the job."""
        return list(self._held.values())

    def hold(self, lease: Lease, task: "asyncio.Task[None]") -> None:
        """Renew this lease until `drop`."""
        self._held[lease.job_id] = lease, task

    def drop(self, lease: Lease) -> None:
        """The job is over, one way or another. We may hold it again already: then it is another lease."""
        if lease.job_id in self._held and self._held[lease.job_id][0] is lease:
            del self._held[lease.job_id]

    def stop(self, reason: str) -> None:
        """Stop every job we hold."""
        for _, task in list(self._held.values()):
            task.cancel(reason)

    async def keep(self) -> None:
        """Renew for ever, and stop the jobs that are not ours to run any more."""
        while True:
            await asyncio.sleep(min(1.0, self._seconds / 3))
            if not self._held:
                continue
            attempts = {job_id: lease.attempt for job_id, (lease, _) in self._held.items()}
            try:
                lost, cancelled = await self._ledger.at_once(Store.renew, attempts, self._worker, self._seconds)
            except Exception as error:  # the database is away: the leases may run out, and then the jobs run again
                log.warning("leases could not be renewed: %s", error, extra={"action": "renew_failed"})
                continue
            for job_ids, reason in ((lost, LOST), (cancelled, CANCELLED)):
                for job_id in job_ids & self._held.keys():
                    self._held[job_id][1].cancel(reason)
