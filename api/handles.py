"""Handles of submitted jobs and batches, which wait, count and read results. They hold only ids, so that any process
can have them.

How waiting works: workers ring a bell (a Redis notification) with the ids they have just committed (see
`worker.queue.notify`), which one thread hears for all callers of a process (see `api.ear`). A handle reads the rows,
listens, reads the rows once more, and from then on fetches the results of the ids that it hears. If this process was
listening already when it submitted the job, nothing was missed, and the handle reads nothing before the bell rings. The
bell may fail, so the rows are read again after each second of silence; they alone decide what is finished.
"""

import math
import time
from collections.abc import AsyncGenerator, Collection, Generator, Iterator
from contextlib import aclosing, closing, suppress
from functools import partial

from evalpool.api.connections import bell, ear, fleet, readings, store
from evalpool.api.ear import QUIET, Rings
from evalpool.api.receiver import in_thread, receiver
from evalpool.api.reports import summary
from evalpool.api.waiting import reasons
from evalpool.schemas.batch import Progress
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result
from evalpool.schemas.rows import batch_of
from evalpool.schemas.verdict import State
from evalpool.worker.queue.publish import UNREACHABLE, wake

STEP = 0.25
"""Seconds that one step of waiting may block."""
PART = 500
"""Results that are in memory at once while a batch is streamed, or fewer if they are large."""


class Job:
    """One submitted job."""

    def __init__(self, job_id: str, rings: Rings | None = None) -> None:
        self.id = job_id
        self.batch_id = batch_of(job_id)
        self._rings = rings
        """Everything that was heard about the job since before it was stored, until somebody waits for it."""

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.id,)  # a copy has heard nothing

    def state(self) -> State:
        """Return the state of the job."""
        return store().state(self.id)

    def cancel(self) -> None:
        """Cancel the job. Within seconds it has the verdict `cancelled`, unless it was finished before."""
        _cancel(job_id=self.id)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result and return it. Raises `TimeoutError` if it takes more than `timeout` seconds."""
        with closing(self._steps(timeout)) as steps:
            return next(result for found in steps for result in found)

    def __await__(self) -> Generator[None, None, Result]:
        return self._awaited().__await__()

    async def _awaited(self) -> Result:
        waiting = receiver()
        async with waiting.listen(self.batch_id) as rings:
            while (found := await waiting.results.ask(self.id)) is None:
                while (rung := await rings.next()) is not None and self.id not in rung:
                    pass
            return found

    def _steps(self, timeout: float | None) -> Generator[list[Result], None, None]:
        rings, self._rings = self._rings, None
        for rung in _rings(self.batch_id, timeout, f"job {self.id}", rings):
            found = readings().call(self.id) if rung is None or self.id in rung else None
            yield [] if found is None else [found]
            if found is not None:
                return


class BatchHandle:
    """Jobs that were submitted together."""

    def __init__(self, batch_id: str) -> None:
        self.id = batch_id

    def __repr__(self) -> str:
        return f"BatchHandle({self.id!r})"

    def progress(self) -> Progress:
        """Return how many jobs are in which state."""
        return store().progress(self.id)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every job has its result. Raises `TimeoutError` if it takes more than `timeout` seconds."""
        for _ in self.watch(math.inf, timeout):
            pass

    def watch(self, every: float = 1.0, timeout: float | None = None) -> Iterator[Progress]:
        """Yield the progress about every `every` seconds, until the batch is complete. Raises `TimeoutError` like
        `wait`."""
        missing, last = 0, -math.inf
        for rung in _rings(self.id, timeout):
            missing -= len(rung or ())
            if rung is None or (rung and missing <= 0) or time.monotonic() - last >= every:
                progress, last = self.progress(), time.monotonic()
                missing = progress.total - progress.done
                yield progress
                if progress.complete:
                    return

    def results(self) -> list[Result]:
        """Return the results so far, in the order of submission."""
        return list(self.stream())

    def stream(self) -> Iterator[Result]:
        """Yield the results so far, in the order of submission, for batches that do not fit in memory."""
        return store().batch_results(self.id)

    def as_completed(self, timeout: float | None = None) -> Iterator[Result]:
        """Yield each result once, as it is committed. Raises `TimeoutError` if they take more than `timeout`
        seconds."""
        with closing(self._steps(timeout)) as steps:
            for found in steps:
                yield from found

    async def __aiter__(self) -> AsyncGenerator[Result, None]:
        """Yield each result once, as it is committed."""
        total = (await in_thread(lambda: store().batch(self.id))).total
        seen: set[str] = set()
        waiting = receiver()
        async with waiting.listen(self.id) as rings:
            rung: list[str] | None = None
            while True:
                if rung is not None:
                    fresh = sorted(set(rung) - seen)
                elif (await waiting.counts.ask(self.id) or 0) > len(seen):
                    fresh = sorted(await in_thread(lambda: store().done(self.id)) - seen)
                else:
                    fresh = []
                for start in range(0, len(fresh), PART):
                    parts = store().results(fresh[start : start + PART])
                    while found := await in_thread(partial(next, parts, None)):
                        seen.update(result.job_id for result in found)
                        for result in found:
                            yield result
                if len(seen) == total:
                    return
                rung = await rings.next()

    def __await__(self) -> Generator[None, None, list[Result]]:
        return self._awaited().__await__()

    async def _awaited(self) -> list[Result]:
        async with aclosing(self.__aiter__()) as results:
            return sorted([result async for result in results], key=lambda result: result.index)

    def report(self, k: Collection[int] = (1, 10, 100)) -> Report:
        """Return the report of the batch, from the results so far, with pass@k for each of these k."""
        if not isinstance(k, Collection) or not all(type(each) is int and each > 0 for each in k):
            raise InvalidJob(f"k: it must be a list of positive whole numbers, not {k!r}")
        return summary.build(store(), self.id, k)

    def cancel(self) -> int:
        """Cancel the waiting jobs, and ask workers to stop the running ones. Returns how many jobs were waiting."""
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
        return store().done(self.id) if store().counts([self.id]).get(self.id, 0) > seen else set()


def _cancel(*, batch_id: str | None = None, job_id: str | None = None) -> int:
    """Cancel jobs, and wake a worker: a twin (an identical job) may have to run now instead of its leader."""
    ended = store().cancel(batch_id=batch_id, job_id=job_id)
    with suppress(*UNREACHABLE):  # the workers' next poll finds it
        wake(bell().client, "twins of cancelled jobs")
    return ended


def _rings(
    batch_id: str, timeout: float | None, what: str = "", heard: Rings | None = None
) -> Generator[list[str] | None, None, None]:
    """Yield for ever what a waiting handle should do next: fetch these ids (maybe none) or, at `None`, read all rows.
    Raises `TimeoutError`, which names `what`, or the batch if that is empty. With `heard`, nothing was missed yet."""
    if timeout is not None and (not isinstance(timeout, int | float) or math.isnan(timeout)):
        raise InvalidJob(f"timeout: it must be a number of seconds, not {timeout!r}")
    seen = time.monotonic()
    deadline = math.inf if timeout is None else seen + timeout
    if heard is None:
        yield None  # before Redis is asked, since finished jobs need no bell
    rings = heard or Rings()
    with ear().listen(batch_id, rings):
        if heard is None:
            yield None  # the bell is not rung again for results that were committed before we listened
        last = time.monotonic()
        while True:
            rung = rings.wait(max(0.0, min(STEP, deadline - time.monotonic())))
            now = time.monotonic()
            if now >= deadline:
                yield None  # one last look
                progress = store().progress(batch_id)
                counts = f"{progress.running:,} running, {progress.queued:,} queued"
                why = "; ".join([counts, *reasons(batch_id, now - seen)])
                raise TimeoutError(f"{what or f'batch {batch_id}'}: not finished after {timeout:g} seconds: {why}")
            if rung is None or rung:
                last = now
                yield rung
            elif now - last >= QUIET:
                last = now
                if timeout is not None and fleet().members:
                    seen = now
                yield None
            else:
                yield []
