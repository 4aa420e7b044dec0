"""How coroutines wait: those of one event loop share a connection to Redis, and their queries are combined.

A thousand coroutines may wait at once, so none of them has a thread or a connection of its own. The first one opens the
connection, and the last one closes it. The bell (a Redis notification) only saves time: the rows decide.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import cache, partial
from typing import Generic, TypeVar

import redis.asyncio
from redis.asyncio.client import PubSub

from evalpool.api.connections import store
from evalpool.schemas.result import Result
from evalpool.schemas.settings import settings
from evalpool.worker.queue.notify import channel, ids_in
from evalpool.worker.queue.publish import UNREACHABLE, redis_options

QUIET = 1.0
"""Seconds without the bell (a Redis notification) after which the rows are read."""
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

    def hear(self, ids: list[str] | None) -> None:
        """Note that these jobs have results or, with `None`, that the rows must be read."""
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
    """Hears the bell for all coroutines of one event loop."""

    def __init__(self) -> None:
        self.results: Questions[Result] = Questions(_results)
        self.counts: Questions[int] = Questions(lambda batch_ids: store().counts(batch_ids))
        """How many jobs of a batch have a result."""
        self._waiting: dict[str, set[Rings]] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def listen(self, batch_id: str) -> AsyncIterator[Rings]:
        """Hear the bell of one batch. Read the rows after entering, since earlier rings are missed."""
        rings = Rings()
        self._waiting.setdefault(batch_id, set()).add(rings)
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._keep())
        try:
            yield rings
        finally:
            self._waiting[batch_id].discard(rings)
            if not self._waiting[batch_id]:
                del self._waiting[batch_id]
            self._changed.set()
            if not self._waiting:
                await self._close()

    async def _close(self) -> None:
        _receivers.pop(asyncio.get_running_loop(), None)  # callers that come meanwhile get a new receiver
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self.results.close()
        await self.counts.close()

    async def _keep(self) -> None:
        """Listen as long as a coroutine waits. While Redis cannot be reached, the rows are read every second."""
        while self._waiting:  # redis-py can lose a cancellation that comes while it connects
            try:
                url = settings().queue_url
                async with redis.asyncio.from_url(url, **redis_options(url)) as client, client.pubsub() as pubsub:
                    await self._follow(pubsub)
            except UNREACHABLE:
                await asyncio.sleep(QUIET)

    async def _follow(self, pubsub: PubSub) -> None:
        heard: set[str] = set()
        message: asyncio.Task[object] | None = None
        change: asyncio.Task[object] | None = None
        try:
            while self._waiting:
                self._changed.clear()
                wanted = set(self._waiting)
                if new := wanted - heard:
                    await pubsub.subscribe(*map(channel, new))
                if gone := heard - wanted:
                    await pubsub.unsubscribe(*map(channel, gone))
                heard = wanted
                message = message or asyncio.create_task(pubsub.get_message(timeout=None))
                change = change or asyncio.create_task(self._changed.wait())
                done, _ = await asyncio.wait([message, change], return_when=asyncio.FIRST_COMPLETED)
                if message in done:
                    self._deliver(message.result())
                    message = None
                if change in done:
                    change = None
        finally:
            left = [task for task in (message, change) if task is not None]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _deliver(self, message: object) -> None:
        if not isinstance(message, dict) or message["type"] not in ("subscribe", "message"):
            return
        batch_id = message["channel"].decode().removeprefix(channel(""))
        # Once the subscription is confirmed, nothing is missed; results that were committed before are not rung again.
        ids = ids_in(message["data"], batch_id) if message["type"] == "message" else None
        for rings in self._waiting.get(batch_id, ()):
            rings.hear(ids)


_receivers: dict[asyncio.AbstractEventLoop, Receiver] = {}
"""The receivers of the loops in which coroutines wait."""


def receiver() -> Receiver:
    """The receiver of the running loop. Listen to it at once: without listeners it is forgotten."""
    for loop in [loop for loop in list(_receivers) if loop.is_closed()]:
        _receivers.pop(loop, None)
    return _receivers.setdefault(asyncio.get_running_loop(), Receiver())


def _results(job_ids: Sequence[str]) -> dict[str, Result]:
    return {result.job_id: result for found in store().results(job_ids) for result in found}
