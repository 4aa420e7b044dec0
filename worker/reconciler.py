"""Polls the ledger every few seconds: for expired leases, for batches whose queueing or cancelling was interrupted, and
for waiting jobs. It runs in every worker, and several at once do no harm."""

import asyncio
import logging
import random
import time
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
        self._told: Member | None = None
        self._told_at = 0.0
        self._interrupted = asyncio.Event()
        """Set when a batch was found whose queueing or cancelling was interrupted."""
        self.counts: Counter[str] = Counter()

    async def keep(self) -> None:
        """Look for ever. The steps do not wait for each other: a large batch can take minutes to finish, and an engine
        can be slow to list its images. The worker reports that it is alive even if it looks for jobs less often."""
        usual = self._settings.reconcile_seconds
        await asyncio.gather(
            self._every(min(usual, self._settings.lease_seconds / 3), self._tell),
            self._every(usual, self._poll),
            self._finish_interrupted(),
        )

    async def look(self) -> None:
        """Take every step once. A step that fails does not stop the others."""
        await self._take(self._tell, self._expire, self._finish, self._look)

    async def _every(self, seconds: float, *steps: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._take(*steps)
            # Not quite regular, so that workers that were started together do not ask together for ever.
            await asyncio.sleep(seconds * random.uniform(0.9, 1))

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

    async def _poll(self) -> None:
        """Ask what there is to do, in one query, and begin with that. Mostly there is nothing to do."""
        pending = await self._ledger.call(Store.pending)
        if pending.interrupted:
            self._interrupted.set()
        await self._take(*[self._expire] * pending.expired, *[self._look] * (pending.waiting or pending.expired))

    async def _finish_interrupted(self) -> None:
        while True:
            await self._interrupted.wait()
            self._interrupted.clear()
            await self._take(self._finish)

    async def _look(self) -> None:
        """Set the worker to work."""
        self._work()

    async def _tell(self) -> None:
        """Write the heartbeat of this worker, with the images that it has: at once if these have changed, and otherwise
        as often as is needed to be counted as alive."""
        member, now = await self._report(), time.monotonic()
        if member != self._told or now - self._told_at > self._settings.lease_seconds / 4:
            await self._ledger.call(Store.report, member)
            self._told, self._told_at = member, now

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
