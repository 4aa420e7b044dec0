"""Sends a worker's messages to Redis in a thread of its own, as a slow or frozen Redis must not hold up the ledger."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import redis

from evalpool.schemas.settings import Settings
from evalpool.worker.queue import publish
from evalpool.worker.queue.notify import Bell

log = logging.getLogger("evalpool.announcer")

WAITING = 100
"""Messages that may wait for a slow Redis. Further ones are dropped: workers and clients poll the rows anyway."""


class Announcer:
    """Tells other workers about waiting jobs, and callers about finished ones. Without it, both only take longer."""

    def __init__(self, settings: Settings) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redis")
        self._bell = Bell(settings.queue_url)
        self._waiting = 0

    def wake(self, what: str) -> None:
        """Tell a free worker that there are jobs, without waiting for Redis."""
        self._submit(lambda: publish.wake(self._bell.client, what))

    def ring(self, job_ids: Iterable[str]) -> None:
        """Say that these jobs have results, without waiting for Redis."""
        self._submit(lambda: self._bell.ring(job_ids))

    def close(self) -> None:
        """Send the messages that still wait, then end the thread and close the connections."""
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
        except publish.UNREACHABLE as error:  # workers and clients find the rows by polling
            log.warning("a message to Redis failed: %s", error, extra={"action": "announce_failed"})
        except Exception:
            log.exception("a message to Redis failed", extra={"action": "bug"})
