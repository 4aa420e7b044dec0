"""Looks at the ledger every few seconds: for jobs whose worker fell silent, for batches that somebody left half done,
and for jobs of which no message has told. Runs in every worker; that several do it at once does no harm."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from schemas.fleet import Member
from schemas.settings import Settings
from schemas.store import Store
from worker.announcer import Announcer
from worker.ledger import Ledger

log = logging.getLogger("evalpool.reconciler")


class Reconciler:
    """Makes the ledger's word good, whatever became of messages."""

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
        """Look for ever. Each thing by itself: a batch that takes minutes to finish, or an engine that is slow to say
        which images it has, must not hold up the others. And however seldom a worker looks, it says in time that it is
        alive."""
        usual = self._settings.reconcile_seconds
        await asyncio.gather(
            self._every(min(usual, self._settings.lease_seconds / 3), self._tell),
            self._every(usual, self._expire, self._look),
            self._every(usual, self._finish),
        )

    async def look(self) -> None:
        """Once."""
        await self._take(self._tell, self._expire, self._finish, self._look)

    async def _every(self, seconds: float, *steps: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._take(*steps)
            await asyncio.sleep(seconds)

    async def _take(self, *steps: Callable[[], Awaitable[None]]) -> None:
        """A step that fails does not keep the others from being taken."""
        for step in steps:
            try:
                await step()
            except Exception as error:  # the database is away, or a row is broken: the next look will do
                self.counts["failed"] += 1
                log.warning(
                    "could not reconcile (%s): %s", step.__name__.strip("_"), error,
                    extra={"action": "reconcile_failed"},
                )  # fmt: skip

    async def _look(self) -> None:
        """Set the worker to work."""
        self._work()

    async def _tell(self) -> None:
        """Say that this worker is alive, and what it can run."""
        await self._ledger.call(Store.report, await self._report())

    async def _expire(self) -> None:
        """Put back what has no live lease."""
        expired = await self._ledger.call(Store.expire, self._settings.max_attempts)
        if expired:
            self.counts["expired"] += expired
            log.warning("%d jobs lost their worker", expired, extra={"action": "leases_expired"})
            self._announcer.wake(f"{expired} jobs lost their worker")

    async def _finish(self) -> None:
        """Do what was left undone with batches whose submitter, or canceller, is gone."""
        for batch_id in await self._ledger.call(Store.abandoned):
            log.warning("finishing what was begun with a batch", extra={"action": "finish", "batch": batch_id})
            for todo, start in await self._ledger.call(Store.left, batch_id):  # leases are renewed in between
                await self._ledger.call(Store.finish_part, batch_id, todo, start)
            self._announcer.wake(f"batch {batch_id}")
