"""Rings again for jobs that nobody is at. Runs in every worker: when two do it at once, it costs a message too many."""

import asyncio
import logging
from collections import Counter

from schemas.settings import Settings
from schemas.store import Store
from worker.announcer import Announcer
from worker.ledger import Ledger

log = logging.getLogger("evalpool.reconciler")

GRACE_LOOKS = 5
"""How long a submission may take from its commit to its last message, in looks of a reconciler."""
STALE_LOOKS = 3
"""How old an announcement must be before an empty queue proves that it was lost."""
AT_ONCE = 5000


class Reconciler:
    """Compares the ledger with the queue."""

    def __init__(self, ledger: Ledger, announcer: Announcer, settings: Settings) -> None:
        self._ledger, self._announcer, self._settings = ledger, announcer, settings
        self._empty_looks = 0
        self.counts: Counter[str] = Counter()

    async def keep(self) -> None:
        """Look for ever."""
        while True:
            try:
                await self.look()
            except Exception as error:  # Redis or the database is away: the next look will do
                log.warning("could not reconcile: %s", error, extra={"action": "reconcile_failed"})
            await asyncio.sleep(self._settings.reconcile_seconds)

    async def look(self) -> int:
        """Once: put back what has no live lease, and announce what waits unannounced; how many were announced."""
        expired = await self._ledger.call(Store.expire, self._settings.max_attempts)
        if expired:
            self.counts["expired"] += expired
            log.warning("%d jobs lost their worker", expired, extra={"action": "leases_expired"})
        # A queue that is long and moves is no reason to ring again; one that is empty while jobs wait is.
        self._empty_looks = 0 if await self._announcer.backlog() else self._empty_looks + 1
        pace = self._settings.reconcile_seconds
        stale = max(1.0, STALE_LOOKS * pace) if self._empty_looks >= 2 else None
        waiting = await self._ledger.call(Store.unannounced, grace=GRACE_LOOKS * pace, stale=stale, limit=AT_ONCE)
        if waiting:
            await self._announcer.announce(waiting)
            self.counts["announced"] += len(waiting)
            log.info("%d jobs were announced again", len(waiting), extra={"action": "announced"})
        return len(waiting)
