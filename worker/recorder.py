"""Results, committed in groups. A result waits a moment for company, but never until nothing else runs: a worker that
commits, asks for more and claims it must have jobs to run meanwhile. A lonely result does not wait at all."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from sqlalchemy import exc

from schemas.result import Result
from schemas.store import Store
from worker.announcer import Announcer
from worker.ledger import Ledger

log = logging.getLogger("evalpool.recorder")

GROUP = 200
"""Most results in one commit."""
COMPANY_SECONDS = 0.1
"""How long a result waits for others: a commit costs as much as a job."""
RETRY_SECONDS = 1.0

Waiting = tuple[Result, "asyncio.Future[None]"]


class Recorder:
    """Takes results from running jobs and says when each is safe."""

    def __init__(self, ledger: Ledger, announcer: Announcer, under_way: Callable[[], int], writer: str = "") -> None:
        self._ledger, self._announcer, self._under_way, self._writer = ledger, announcer, under_way, writer
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(maxsize=GROUP * 4)

    async def record(self, result: Result) -> None:
        """Return when the result is committed. Only then may the message be acknowledged."""
        saved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._queue.put((result, saved))
        await saved

    async def keep(self) -> None:
        """Commit for ever."""
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
        """Until it has worked: with the database away the jobs wait here, and no more are taken than fit."""
        while True:
            try:
                new = await self._ledger.call(Store.record, [result for result, _ in group], self._writer)
                self._announcer.ring(new)
                if not all(result.verdict.scored for result, _ in group):
                    self._announcer.wake("twins may have taken the place of their leader")
                break
            except (exc.OperationalError, exc.InterfaceError, exc.TimeoutError) as error:  # it is away, locked or full
                log.warning("results could not be committed yet: %s", error, extra={"action": "commit_failed"})
                await asyncio.sleep(RETRY_SECONDS)
            except Exception as error:  # one of them cannot be stored: the others must not suffer for it
                if len(group) > 1:
                    for each in group:
                        await self._commit([each])
                elif not group[0][1].done():
                    group[0][1].set_exception(error)
                return
        for result, saved in group:
            if not saved.done():
                saved.set_result(None)
            if result.job_id not in new:
                log.info("a result was there already", extra={"action": "duplicate_dropped", "job": result.job_id})
