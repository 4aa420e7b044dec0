"""Polls the ledger every few seconds: for expired leases, for batches whose queueing or cancelling was interrupted, and
for waiting jobs. It runs in every worker, and several at once do no harm."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from evalpool.schemas.fleet import Member
from evalpool.schemas.settings import Settings
from evalpool.schemas.store import Store
from evalpool.worker.ledger import Ledger
from evalpool.worker.queue.announcer import Announcer

log = logging.getLogger("evalpool.reconciler")


class Reconciler:
    """Makes progress certain even if messages are lost."""

    def __init__(
        self,
        ledger: Ledger,
        announcer: Announcer,
        settings: Settings,
        *,
        report: Callable[[], Awaitable[Member]],
        work: Callable[[], None],
    ) -> None:
        self._ledger, self._announcer, self._settings = ledger, announcer, settings
        self._report, self._work = report, work
        self.counts: Counter[str] = Counter()

    async def keep(self) -> None:
        """Look for ever. The steps do not wait for each other: a large batch can take minutes to finish, and an engine
        can be slow to list its images. The worker reports that it is alive even if it looks for jobs less often."""
        usual = self._settings.reconcile_seconds
        await asyncio.gather(
            self._every(min(usual, self._settings.lease_seconds / 3), self._tell),
            self._every(usual, self._expire, self._look),
            self._every(usual, self._finish),
        )

    async def look(self) -> None:
        """Take every step once. A step that fails does not stop the others."""
        await self._take(self._tell, self._expire, self._finish, self._look)

    async def _every(self, seconds: float, *steps: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._take(*steps)
            await asyncio.sleep(seconds)

    async def _take(self, *steps: Callable[[], Awaitable[None]]) -> None:
        for step in steps:
            try:
                await step()
            except Exception as error:  # the database is away, or a row is broken: the next look tries again
                self.counts["failed"] += 1
                log.warning(
                    "could not reconcile (%s): %s", step.__name__.strip("_"), error,
                    extra={"action": "reconcile_failed"},
                )  # fmt: skip

    async def _look(self) -> None:
        """Set the worker to work."""
        self._work()

    async def _tell(self) -> None:
        """Write the heartbeat of this worker, with the images that it has."""
        await self._ledger.call(Store.report, await self._report())

    async def _expire(self) -> None:
        """Requeue jobs whose lease has expired."""
        expired = await self._ledger.call(Store.expire, self._settings.max_attempts)
        if expired:
            self.counts["expired"] += expired
            log.warning("the leases of %d jobs have expired", expired, extra={"action": "leases_expired"})
            self._announcer.wake(f"{expired} leases expired")

    async def _finish(self) -> None:
        """Finish queueing or cancelling the batches of processes that have died."""
        for batch_id in await self._ledger.call(Store.abandoned):
            log.warning("finishing an interrupted batch", extra={"action": "finish", "batch": batch_id})
            for step in await self._ledger.call(Store.steps, batch_id):  # other queries run between the steps
                await self._ledger.call(Store.take_step, batch_id, step)
            self._announcer.wake(f"batch {batch_id}")
