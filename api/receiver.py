"""How coroutines wait: they share the process's one connection to Redis (see `api.ear`), and the queries of one event
loop are combined.

A thousand coroutines may wait at once, so none of them has a thread of its own.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from functools import cache, partial
from typing import Generic, TypeVar

from evalpool.api.connections import ear, store
from evalpool.api.ear import QUIET
from evalpool.schemas.result import Result

THREADS = 8
"""Queries and submissions of coroutines that run at the same time."""

T = TypeVar("T")


@cache
def _threads(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "evalpool")


def in_background(call: Callable[[], T]) -> "Future[T]":
    """Run a blocking call in a thread of ours, with the caller's context (which may choose the settings). asyncio's own
    executor is not used, since the caller may have occupied all its threads."""
    return _threads(os.getpid()).submit(partial(copy_context().run, call))


async def in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in one of our threads, and await it. Cancelling does not stop a call that has begun, so keep
    it short."""
    return await asyncio.wrap_future(in_background(call))


class Questions(Generic[T]):
    """Collects the questions that are asked while a query runs, and answers them all with the next query."""

    def __init__(self, query: Callable[[Sequence[str]], Mapping[str, T]]) -> None:
        self._query = query
        self._asked: dict[str, asyncio.Future[T | None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def ask(self, key: str) -> T | None:
        """Return the answer for this key, or `None` if there is none yet."""
        answer = self._asked.setdefault(key, asyncio.get_running_loop().create_future())
        if self._task is None:
            self._task = asyncio.create_task(self._answer())
        return await asyncio.shield(answer)  # others may be waiting for the same answer

    async def _answer(self) -> None:
        try:
            while self._asked:
                asked, self._asked = self._asked, {}
                try:
                    found = await in_thread(partial(self._query, sorted(asked)))
                except Exception as error:
                    for answer in asked.values():
                        answer.set_exception(error)
                        answer.exception()  # asyncio would log it if the caller has been cancelled
                else:
                    for key, answer in asked.items():
                        answer.set_result(found.get(key))
        finally:
            self._task = None

    async def close(self) -> None:
        """Stop answering, when there are no more callers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


class Rings:
    """What one coroutine has heard about a batch since it last asked."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._look = False
        self._heard = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def hear(self, ids: list[str] | None) -> None:
        """Note that these jobs have results or, with `None`, that the rows must be read. Any thread may call this."""
        with suppress(RuntimeError):  # the loop was closed while a coroutine still waited
            self._loop.call_soon_threadsafe(self._note, ids)

    def _note(self, ids: list[str] | None) -> None:
        self._ids += ids or ()
        self._look |= ids is None
        self._heard.set()

    async def next(self) -> list[str] | None:
        """Return the jobs for which the bell has rung, or `None` if the rows must be read: there was silence for a
        second, or something may have been missed."""
        try:
            async with asyncio.timeout(QUIET):
                await self._heard.wait()
        except TimeoutError:
            return None
        self._heard.clear()
        ids, self._ids = self._ids, []
        look, self._look = self._look, False
        return None if look else ids


class Receiver:
    """What the coroutines of one event loop share while they wait."""

    def __init__(self) -> None:
        self.results: Questions[Result] = Questions(_results)
        self.counts: Questions[int] = Questions(lambda batch_ids: store().counts(batch_ids))
        """How many jobs of a batch have a result."""
        self._listeners = 0

    @asynccontextmanager
    async def listen(self, batch_id: str) -> AsyncIterator[Rings]:
        """Hear the bell of one batch. Read the rows after entering, since earlier rings are missed."""
        rings = Rings()
        self._listeners += 1
        try:
            with ear().listen(batch_id, rings):
                yield rings
        finally:
            self._listeners -= 1
            if not self._listeners:
                _receivers.pop(asyncio.get_running_loop(), None)  # callers that come meanwhile get a new receiver
                await self.results.close()
                await self.counts.close()


_receivers: dict[asyncio.AbstractEventLoop, Receiver] = {}
"""The receivers of the loops in which coroutines wait."""


def receiver() -> Receiver:
    """The receiver of the running loop. Listen to it at once: without listeners it is forgotten."""
    for loop in [loop for loop in list(_receivers) if loop.is_closed()]:
        _receivers.pop(loop, None)
    return _receivers.setdefault(asyncio.get_running_loop(), Receiver())


def _results(job_ids: Sequence[str]) -> dict[str, Result]:
    return {result.job_id: result for found in store().results(job_ids) for result in found}
