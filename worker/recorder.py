"""Commits results in groups. A result waits a moment for others, but not until all jobs have ended: the worker must
have jobs to run while it commits and claims new ones. If no other job runs, a result does not wait at all."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from sqlalchemy import exc

from evalpool.schemas import rows
from evalpool.schemas.result import Result
from evalpool.schemas.store import Store
from evalpool.worker.ledger import Ledger
from evalpool.worker.queue.announcer import Announcer

log = logging.getLogger("evalpool.recorder")

GROUP = 200
"""The most results in one commit."""
CHARACTERS = 64 << 20
"""A commit whose outputs have as many characters takes no further result: all of them are in memory several times."""
COMPANY_SECONDS = 0.1
"""How long a result waits for others, since a commit costs as much as a job."""
RETRY_SECONDS = 1.0
TRIES = 3
"""How often a group is tried until each of its results is tried by itself."""


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
        self._alone: asyncio.Queue[Waiting] = asyncio.Queue()
        """The results of groups that could not be committed, each of which is tried by itself."""

    async def record(self, result: Result) -> None:
        """Return when the result is committed. Only then may the message be acknowledged."""
        saved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._queue.put(Waiting(result, saved))
        await saved

    async def keep(self) -> None:
        """Commit results, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_trying())
            while True:
                await self._commit(await self._group())

    async def _group(self) -> Sequence[Waiting]:
        """Wait for a result, and a moment for others."""
        group = [await self._queue.get()]
        size = rows.size(group[0].result)
        until = asyncio.get_running_loop().time() + COMPANY_SECONDS
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while self._queue.qsize() or len(group) < self._under_way() // 2:
                    if len(group) == GROUP or size >= CHARACTERS:
                        break
                    group.append(await self._queue.get())
                    size += rows.size(group[-1].result)
        return group

    async def _commit(self, group: Sequence[Waiting]) -> None:
        """Commit a group. If that fails again and again, its results wait aside: the database may be away, or one of
        them is what fails, which must not hold up the others."""
        for _ in range(TRIES):
            if await self._try(group):
                return
            await asyncio.sleep(RETRY_SECONDS)
        self._set_aside(group)

    async def _keep_trying(self) -> None:
        """Commit the results that wait aside one by one, in turn, however often that has to be tried. The worker takes
        no more jobs meanwhile than it has room for."""
        while True:
            waiting = await self._alone.get()
            if not await self._try([waiting]):
                self._set_aside([waiting])
                await asyncio.sleep(RETRY_SECONDS)

    async def _try(self, group: Sequence[Waiting]) -> bool:
        """Try to commit a group. Returns whether it need not be tried again."""
        results = [waiting.result for waiting in group]
        try:
            new = await self._ledger.call(Store.record, results, self._writer)
        except (exc.OperationalError, exc.InterfaceError, exc.TimeoutError) as error:  # it is away, locked or full
            log.warning("results could not be committed yet: %s", error, extra={"action": "commit_failed"})
            return False
        except Exception as error:  # one of them cannot be stored
            if len(group) > 1:
                self._set_aside(group)
            elif not group[0].saved.done():
                group[0].saved.set_exception(error)
        else:
            self._announce(results, new)
            for waiting in group:
                if not waiting.saved.done():
                    waiting.saved.set_result(None)
        return True

    def _set_aside(self, group: Sequence[Waiting]) -> None:
        for waiting in group:
            self._alone.put_nowait(waiting)

    def _announce(self, results: Sequence[Result], new: set[str]) -> None:
        """Ring for the results that are new, and wake a worker if a twin (an identical job) may have to run now."""
        self._announcer.ring(new)
        if not all(result.verdict.scored for result in results):
            self._announcer.wake("twins may have taken the place of their leader")
        for result in results:
            if result.job_id not in new:
                log.info("the job has a result already", extra={"action": "duplicate_dropped", "job": result.job_id})
