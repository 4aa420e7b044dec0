"""Rings again for jobs that nobody is at. Runs in every worker: when two do it at once, it costs a message too many."""

import asyncio
import logging
from collections import Counter
from contextlib import suppress

import redis

from schemas.settings import Settings
from schemas.store import Store
from worker import celery
from worker.ledger import Ledger

log = logging.getLogger("evalpool.reconciler")

GRACE_SECONDS = 15.0
"""How long a submission may take from its commit to its last message."""
STALE_SECONDS = 10.0
"""How old an announcement must be before an empty queue proves that it was lost."""
AT_ONCE = 5000


class Reconciler:
    """Compares the ledger with the queue."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger, self._settings = ledger, settings
        self._client = celery.redis_client(settings.queue_url)
        self._empty_looks = 0
        self.counts: Counter[str] = Counter()

    async def keep(self) -> None:
        """Look for ever."""
        while True:
            try:
                await self._ledger.call(self.look)
            except Exception as error:  # Redis or the database is away: the next look will do
                log.warning("could not reconcile: %s", error, extra={"action": "reconcile_failed"})
            await asyncio.sleep(self._settings.reconcile_seconds)

    def look(self, store: Store) -> int:
        """Once: put back what has no live lease, and announce what waits unannounced; how many were announced."""
        expired = store.expire(self._settings.max_attempts)
        if expired:
            self.counts["expired"] += expired
            log.warning("%d jobs lost their worker", expired, extra={"action": "leases_expired"})
        # A queue that is long and moves is no reason to ring again; one that is empty while jobs wait is.
        self._empty_looks = 0 if celery.backlog(self._client) else self._empty_looks + 1
        stale = STALE_SECONDS if self._empty_looks >= 2 else None
        waiting = store.unannounced(grace=GRACE_SECONDS, stale=stale, limit=AT_ONCE)
        if waiting:
            size = celery.chunk_size(len(waiting), self._settings.slots, self._settings.chunk)
            celery.publish(sorted(waiting, key=lambda job: job[1]), size)
            store.mark_published([job_id for job_id, _ in waiting])
            self.counts["announced"] += len(waiting)
            log.info("%d jobs were announced again", len(waiting), extra={"action": "announced"})
        return len(waiting)

    def close(self) -> None:
        """Let go of the connection."""
        with suppress(redis.RedisError):
            self._client.close()
