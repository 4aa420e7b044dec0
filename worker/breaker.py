"""The circuit breaker: while Docker or the database is away, a worker takes no jobs. It resumes by itself."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger("evalpool.breaker")

LOOK_SECONDS = 1.0


class Breaker:
    """Open while a service that the worker needs is away. No jobs are taken until a probe succeeds."""

    def __init__(self, what: str, probe: Callable[[], Awaitable[object]]) -> None:
        self.what, self._probe = what, probe
        self._closed = asyncio.Event()
        self._closed.set()
        self._looking: asyncio.Task[None] | None = None
        self._reason = ""
        self._since = 0.0
        self._over = False

    @property
    def state(self) -> str:
        """The state for people: `ok`, or for how long the service has been away and why."""
        return "ok" if self._closed.is_set() else f"away for {time.monotonic() - self._since:.0f} s: {self._reason}"

    @property
    def is_closed(self) -> bool:
        """Whether the service is there."""
        return self._closed.is_set()

    async def closed(self) -> None:
        """Wait until the service is there."""
        await self._closed.wait()

    def trip(self, reason: str) -> None:
        """Open the breaker: log that the service is away, and probe it until it is back."""
        if self._over or not self._closed.is_set():
            return
        self._closed.clear()
        self._reason, self._since = reason, time.monotonic()
        log.error("%s is away, no jobs are taken: %s", self.what, reason, extra={"action": "breaker_open"})
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._probe()
            except Exception as error:
                self._reason = str(error)
                continue
            log.warning(
                "%s is back after %.0f s", self.what, time.monotonic() - self._since, extra={"action": "breaker_closed"}
            )
            self._closed.set()
            return

    def close(self) -> None:
        """Stop probing and release all waiters. The breaker cannot open again, as a failure must not keep a worker
        alive."""
        self._over = True
        if self._looking is not None:
            self._looking.cancel()
        self._closed.set()
