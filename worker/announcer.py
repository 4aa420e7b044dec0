"""What a worker says to Redis, in a thread of its own: a Redis that is slow or frozen must not hold up the ledger."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import redis

from schemas.settings import Settings
from worker import celery
from worker.bell import Bell

log = logging.getLogger("evalpool.announcer")

WAITING = 100
"""Messages that may wait for a slow Redis; beyond it they are left out, and whoever listens looks at the rows."""


class Announcer:
    """Tells other workers of waiting jobs, and callers of finished ones. Nothing depends on it but their patience."""

    def __init__(self, settings: Settings) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redis")
        self._bell = Bell(settings.queue_url)
        self._waiting = 0

    def wake(self, what: str) -> None:
        """Say that there are jobs for whoever is free, without waiting for it."""
        self._submit(lambda: celery.wake(self._bell.client, what))

    def ring(self, job_ids: Iterable[str]) -> None:
        """Say that these jobs have results, without waiting for it."""
        self._submit(lambda: self._bell.ring(job_ids))

    def close(self) -> None:
        """Say what is still to be said, and let go of the thread and the connections."""
        self._thread.shutdown(wait=True)
        with suppress(redis.RedisError):
            self._bell.close()

    def _submit(self, call: Callable[[], None]) -> None:
        if self._waiting < WAITING:
            self._waiting += 1
            self._thread.submit(self._say, call)

    def _say(self, call: Callable[[], None]) -> None:
        self._waiting -= 1
        try:
            call()
        except celery.UNREACHABLE as error:  # the others look at the rows every few seconds
            log.warning("Redis could not be told: %s", error, extra={"action": "announce_failed"})
        except Exception:
            log.exception("Redis could not be told", extra={"action": "bug"})
