"""What a submission gives back: handles that wait, count and read. They hold ids only, so any process can have them.

How waiting works: workers ring a bell with the ids they have just committed (see `worker.bell`). A handle looks at the
rows, listens, looks once more, and from then on fetches just what was rung. The bell may fail or be missed, so the
rows are looked at again whenever it was quiet for a second; they alone decide what is finished.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, suppress
from typing import TypeVar

from api import reports
from api.connections import bell, store
from api.waiting import reasons
from schemas.batch import Progress
from schemas.report import Report
from schemas.result import Result
from schemas.rows import batch_of
from schemas.verdict import State
from worker.celery import UNREACHABLE, wake

STEP = 0.25
"""Seconds that one step of waiting may block: as long as a cancelled coroutine has to wait for its thread."""
QUIET = 1.0
"""Seconds without the bell after which the rows are looked at."""
PART = 500
"""Results that are in memory at once while a batch is streamed; fewer if they are large."""

_threads = ThreadPoolExecutor(64, "evalpool-wait")
"""Where coroutines wait: asyncio's own few threads would be taken up by a handful of them."""

T = TypeVar("T")


class Job:
    """One submitted job."""

    def __init__(self, job_id: str) -> None:
        self.id = job_id
        self.batch_id = batch_of(job_id)

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def state(self) -> State:
        """How far it has come."""
        return store().state(self.id)

    def cancel(self) -> None:
        """Never start it, or stop it: within seconds it has the verdict `cancelled`, unless it was finished before."""
        _cancel(job_id=self.id)

    def result(self, timeout: float | None = None) -> Result:
        """What came out; waits for it, and raises `TimeoutError` when it is not there after so many seconds."""
        with closing(self._steps(timeout)) as steps:
            return next(result for found in steps for result in found)

    def __await__(self) -> Generator[None, None, Result]:
        return self._first().__await__()

    async def _first(self) -> Result:
        async with aclosing(_as_async(self._steps(None))) as results:
            return await anext(results)

    def _steps(self, timeout: float | None) -> Generator[list[Result], None, None]:
        for rung in _rings(self.batch_id, timeout):
            found = next(store().results([self.id]), []) if rung is None or self.id in rung else []
            yield found
            if found:
                return


class BatchHandle:
    """Jobs that were submitted together."""

    def __init__(self, batch_id: str) -> None:
        self.id = batch_id

    def __repr__(self) -> str:
        return f"BatchHandle({self.id!r})"

    def progress(self) -> Progress:
        """How many of its jobs are in which state."""
        return store().progress(self.id)

    def wait(self, timeout: float | None = None) -> None:
        """Return when every job has its result; raises `TimeoutError` when that takes longer."""
        for _ in self.watch(math.inf, timeout):
            pass

    def watch(self, every: float = 1.0, timeout: float | None = None) -> Iterator[Progress]:
        """The progress, about every so many seconds, until it is complete."""
        missing, told = 0, -math.inf
        for rung in _rings(self.id, timeout):
            missing -= len(rung or ())
            if rung is None or (rung and missing <= 0) or time.monotonic() - told >= every:
                progress, told = self.progress(), time.monotonic()
                missing = progress.total - progress.done
                yield progress
                if progress.complete:
                    return

    def results(self) -> list[Result]:
        """The results there are by now, in the order of submission."""
        return list(self.stream())

    def stream(self) -> Iterator[Result]:
        """The same, a part at a time, for batches that do not fit in memory."""
        return store().batch_results(self.id)

    def as_completed(self, timeout: float | None = None) -> Iterator[Result]:
        """Each result once, as it is committed; raises `TimeoutError` when they are not all there in time."""
        with closing(self._steps(timeout)) as steps:
            for found in steps:
                yield from found

    def __aiter__(self) -> AsyncIterator[Result]:
        return _as_async(self._steps(None))

    def report(self, k: Collection[int] = (1, 10, 100)) -> Report:
        """The batch summed up, as far as it has come."""
        return reports.build(store(), self.id, k)

    def cancel(self) -> int:
        """End its waiting jobs and ask for the end of the running ones; how many had not started."""
        return _cancel(batch_id=self.id)

    def _steps(self, timeout: float | None) -> Generator[list[Result], None, None]:
        total = store().batch(self.id).total
        seen: set[str] = set()
        for rung in _rings(self.id, timeout):
            fresh = sorted((self._done(len(seen)) if rung is None else set(rung)) - seen)
            for start in range(0, len(fresh), PART):
                for found in store().results(fresh[start : start + PART]):
                    seen.update(result.job_id for result in found)
                    yield found
            if len(seen) == total:
                return
            if not fresh:
                yield []

    def _done(self, seen: int) -> set[str]:
        """The ids of all jobs that have a result. The query is skipped if none is new, as counting is cheaper."""
        return store().done(self.id) if store().progress(self.id).done > seen else set()


def _cancel(*, batch_id: str | None = None, job_id: str | None = None) -> int:
    """Cancel, and wake a worker, since a twin may have to run now in the place of its leader."""
    ended = store().cancel(batch_id=batch_id, job_id=job_id)
    with suppress(*UNREACHABLE):  # the workers' next poll finds it
        wake(bell().client, "twins of cancelled jobs")
    return ended


def _rings(batch_id: str, timeout: float | None) -> Generator[list[str] | None, None, None]:
    """What to do next, for ever: fetch these ids (maybe none), or, at `None`, look at all rows."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    yield None  # before Redis is asked: what is finished needs no bell
    with bell().listen(batch_id) as listener:
        yield None  # what was committed before we listened is not rung again
        heard = time.monotonic()
        while True:
            rung = listener.wait(max(0.0, min(STEP, deadline - time.monotonic())))
            now = time.monotonic()
            if now >= deadline:
                yield None  # one last look
                why = "".join(f"; {reason}" for reason in reasons(batch_id))
                raise TimeoutError(f"batch {batch_id}: not finished after {timeout:g} seconds{why}")
            if rung is not None:
                heard = now
                yield rung
            elif now - heard >= QUIET:
                heard = now
                yield None
            else:
                yield []


async def _as_async(steps: Generator[list[Result], None, None]) -> AsyncGenerator[Result, None]:
    with closing(steps):
        while (found := await _in_thread(lambda: next(steps, None))) is not None:
            for result in found:
                yield result


async def _in_thread(call: Callable[[], T]) -> T:
    future = _threads.submit(call)
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        # The step is short. Going on without it would close the bell under a thread that still listens.
        if not future.cancel():
            await asyncio.wait([waiting])
        raise
