"""What a worker says to Redis, in a thread of its own: a Redis that is slow or frozen must not hold up the ledger."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

import redis

from schemas.settings import Settings
from schemas.store import Store
from worker import celery
from worker.bell import Bell
from worker.ledger import Ledger

log = logging.getLogger("evalpool.announcer")

P = ParamSpec("P")
T = TypeVar("T")

RINGS_WAITING = 100
"""Rings that may wait for a slow Redis; beyond it they are left out, and who listens looks at the rows."""


class Announcer:
    """Announces waiting jobs and finished ones."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger, self._settings = ledger, settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redis")
        self._client = celery.redis_client(settings.queue_url)
        self._bell = Bell(settings.queue_url)
        self._waiting = 0

    async def announce(self, jobs: Sequence[tuple[str, str]]) -> None:
        """Tell Redis of these jobs, given as (id, priority), and note that it was told. Raises one of `UNREACHABLE`."""
        ordered = sorted(jobs, key=lambda job: job[1])
        size = celery.chunk_size(len(jobs), self._settings.slots, self._settings.chunk)
        await self._call(celery.publish, ordered, size)
        await self._ledger.call(Store.mark_published, [job_id for job_id, _ in jobs])

    async def backlog(self) -> int:
        """Messages that wait, or are in the hands of a worker."""
        return await self._call(celery.backlog, self._client)

    def ring(self, job_ids: Iterable[str]) -> None:
        """Say that these jobs have results, without waiting for it."""
        if self._waiting < RINGS_WAITING:
            self._waiting += 1
            self._thread.submit(self._ring, job_ids)

    def close(self) -> None:
        """Let go of the thread and the connections."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        with suppress(redis.RedisError):
            self._client.close()
            self._bell.close()

    def _ring(self, job_ids: Iterable[str]) -> None:
        self._waiting -= 1
        self._bell.ring(job_ids)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))
