"""Commits results in groups. A result waits a moment for others, but not until all jobs have ended: the worker must
have jobs to run while it commits and claims new ones. If no other job runs, a result does not wait at all."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from sqlalchemy import exc

from evalpool.schemas.result import Result
from evalpool.schemas.store import Store
from evalpool.worker.ledger import Ledger
from evalpool.worker.queue.announcer import Announcer

log = logging.getLogger("evalpool.recorder")

GROUP = 200
"""The most results in one commit."""
COMPANY_SECONDS = 0.1
"""How long a result waits for others, since a commit costs as much as a job."""
RETRY_SECONDS = 1.0


class Waiting(NamedTuple):
    """A result that is not committed yet."""

    result: Result
    saved: "asyncio.Future[None]"
    """Done when the result is committed."""


class Recorder:
    """Takes results from jobs that have ended, and commits them."""

    def __init__(self, ledger: Ledger, announcer: Announcer, under_way: Callable[[], int], writer: str = "") -> None:
        self._ledger, self._announcer, self._under_way, self._writer = ledger, announcer, under_way, writer
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(maxsize=GROUP * 4)

    async def record(self, result: Result) -> None:
        """Return when the result is committed. Only then may the message be acknowledged."""
        saved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._queue.put(Waiting(result, saved))
        await saved

    async def keep(self) -> None:
        """Commit results, for ever."""
        while True:
            group = [await self._queue.get()]
            until = asyncio.get_running_loop().time() + COMPANY_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    while self._queue.qsize() or len(group) < self._under_way() // 2:
                        if len(group) == GROUP:
                            break
                        group.append(await self._queue.get())
            await self._commit(group)

    async def _commit(self, group: Sequence[Waiting]) -> None:
        """Commit a group, however often that has to be tried. If the database is away, the jobs wait here, and the
        worker takes no more of them than it has room for."""
        results = [waiting.result for waiting in group]
        while True:
            try:
                new = await self._ledger.call(Store.record, results, self._writer)
            except (exc.OperationalError, exc.InterfaceError, exc.TimeoutError) as error:  # it is away, locked or full
                log.warning("results could not be committed yet: %s", error, extra={"action": "commit_failed"})
                await asyncio.sleep(RETRY_SECONDS)
            except Exception as error:
                await self._isolate(group, error)
                return
            else:
                self._announce(results, new)
                for waiting in group:
                    if not waiting.saved.done():
                        waiting.saved.set_result(None)
                return

    async def _isolate(self, group: Sequence[Waiting], error: Exception) -> None:
        """Commit each result of a group by itself, since one of them cannot be stored and must not hold up the
        others."""
        if len(group) > 1:
            for waiting in group:
                await self._commit([waiting])
        elif not group[0].saved.done():
            group[0].saved.set_exception(error)

    def _announce(self, results: Sequence[Result], new: set[str]) -> None:
        """Ring for the results that are new, and wake a worker if a twin (an identical job) may have to run now."""
        self._announcer.ring(new)
        if not all(result.verdict.scored for result in results):
            self._announcer.wake("twins may have taken the place of their leader")
        for result in results:
            if result.job_id not in new:
                log.info("the job has a result already", extra={"action": "duplicate_dropped", "job": result.job_id})
