"""Lends warm sandboxes. A sandbox that comes back is reset, or destroyed and replaced by a new one.

Everything here runs on one event loop and needs no lock. A *slot* is the right to run a job. There is one sandbox more
than there are slots, so that one can be reset or started while all slots work.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from weakref import WeakSet

from evalpool.schemas.errors import EvalpoolError, NoSandbox, PoolClosed, SandboxLost
from evalpool.worker.sandbox.base import Box, Shape

log = logging.getLogger("evalpool.pool")

REFILL_PAUSE = 2.0
"""How many seconds to wait before a sandbox is started again in the background, if that has failed."""
CLOSE_SECONDS = 5.0
ALONE_SECONDS = 10.0
"""How long slots may stand idle so that one job runs alone."""
ALONE_RUNS = 8
"""How often slots may stand idle for one batch. Its further jobs run beside others."""
BATCHES = 1000
"""For how many batches this is counted."""


class Pool:
    """The warm sandboxes of one worker."""

    def __init__(self, make: Callable[[Shape], Awaitable[Box]], slots: int, max_uses: int, *, spare: int = 1) -> None:
        self._make, self._max_uses, self._others = make, max_uses, slots - 1
        self._slots = asyncio.Semaphore(slots)
        self._alone = asyncio.Lock()
        """Held by a job that waits for all slots, as two of them would wait for each other."""
        self._stood: dict[str, int] = {}
        """Batch → how often the slots stood idle for it."""
        self._size = slots + spare
        self._idle: list[Box] = []
        self._alive: set[Box] = set()
        self._starting = 0
        self._changed = asyncio.Condition()
        self._background: set[asyncio.Task[None]] = set()
        self._lending = True
        self._begun: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.counts: Counter[str] = Counter()
        """How many sandboxes were created, lent and reset so far, and how many were destroyed for which reason."""

    async def warm(self, shape: Shape) -> None:
        """Fill the pool. Raises what the first sandbox raised that could not be started."""
        results = await asyncio.gather(*(self._start(shape) for _ in range(self._size)), return_exceptions=True)
        for result in results:
            if isinstance(result, Box):
                self._idle.append(result)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    @asynccontextmanager
    async def lend(self, shape: Shape, *, fresh: bool = False, alone: str | None = None) -> AsyncIterator[Box]:
        """Lend a sandbox of this shape for one run. With `alone`, the name of a batch, no other sandbox is lent
        meanwhile, unless that takes too long or has happened too often for this batch. An exception in the body
        destroys the sandbox."""
        async with self._every_slot() if alone is not None and self._may_stand(alone) else self._slots:
            if (task := asyncio.current_task()) is not None:
                self._begun.add(task)
            sandbox = await self._take(shape, fresh)
            self.counts["lent"] += 1
            kept = False
            try:
                yield sandbox
                kept = not fresh
            finally:
                # In the background, while the slot goes on with another sandbox.
                self._spawn(self._take_back(sandbox, kept))

    @asynccontextmanager
    async def _every_slot(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as held, self._alone:
            await held.enter_async_context(self._slots)
            with suppress(TimeoutError):
                async with asyncio.timeout(ALONE_SECONDS):
                    for _ in range(self._others):
                        await held.enter_async_context(self._slots)
            yield

    def _may_stand(self, batch: str) -> bool:
        """Whether the slots may stand idle for a batch once more."""
        times = self._stood.pop(batch, 0)
        self._stood[batch] = min(times + 1, ALONE_RUNS)  # now the last one to be forgotten
        if len(self._stood) > BATCHES:
            self._stood.pop(next(iter(self._stood)))
        return times < ALONE_RUNS

    def begun(self, task: "asyncio.Task[Any]") -> bool:
        """Whether this task has a slot: a sandbox is lent to it, or is being started for it. The start may take long,
        but no other worker would be faster."""
        return task in self._begun

    def stop_lending(self) -> None:
        """Lend no more sandboxes: jobs that run may finish, and jobs that wait get `PoolClosed`."""
        self._lending = False
        self._spawn(self._notify())

    async def close(self) -> None:
        """Destroy all sandboxes."""
        self._lending = False
        closing = [asyncio.ensure_future(sandbox.close()) for sandbox in self._alive]
        # Starts get a moment to end by themselves, since a container that is half made would be left behind.
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS), self._changed:
                await self._changed.wait_for(lambda: not self._starting)
        while self._background:
            _, late = await asyncio.wait(self._background, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
        closing += [asyncio.ensure_future(sandbox.close()) for sandbox in self._alive]
        await asyncio.gather(*closing, return_exceptions=True)
        self._alive.clear()
        self._idle.clear()

    def snapshot(self) -> dict[str, Any]:
        """The state of the pool, for people and monitors."""
        return {
            "size": self._size,
            "idle": len(self._idle),
            "alive": len(self._alive),
            "starting": self._starting,
            "lending": self._lending,
            "counts": dict(self.counts),
            "sandboxes": [
                {
                    "id": sandbox.id[:12],
                    "image": sandbox.shape.image,
                    "uses": sandbox.uses,
                    "idle": sandbox in self._idle,
                }
                for sandbox in self._alive
            ],
        }

    async def _take(self, shape: Shape, fresh: bool) -> Box:
        while True:
            if not self._lending:
                raise PoolClosed("this worker is shutting down")
            sandbox = self._pick(shape, fresh)
            if sandbox is not None:
                return sandbox
            if len(self._alive) + self._starting < self._size or self._evict():
                return await self._start(shape)
            async with self._changed:
                await self._changed.wait()

    def _pick(self, shape: Shape, fresh: bool) -> Box | None:
        for sandbox in [sandbox for sandbox in self._idle if not sandbox.alive]:
            self._idle.remove(sandbox)
            self._destroy(sandbox, "found dead")
        for sandbox in self._idle:
            if sandbox.shape == shape and not (fresh and sandbox.uses):
                self._idle.remove(sandbox)
                return sandbox
        return None

    def _evict(self) -> bool:
        """Make room by destroying the sandbox that has been idle longest."""
        if not self._idle:
            return False
        self._destroy(self._idle.pop(0), "other shape wanted")
        return True

    async def _start(self, shape: Shape) -> Box:
        self._starting += 1
        try:
            try:
                sandbox = await self._make(shape)
            except SandboxLost as error:
                raise NoSandbox(str(error)) from error
            if not self._lending:
                await sandbox.close()
                raise PoolClosed("the pool was closed while a sandbox started")
            self._alive.add(sandbox)
        finally:
            self._starting -= 1
            self._spawn(self._notify())
        self.counts["created"] += 1
        return sandbox

    async def _take_back(self, sandbox: Box, kept: bool) -> None:
        if not kept:
            reason = "not reusable"
        elif sandbox.suspect:
            reason = "abnormal end"
        elif sandbox.uses >= self._max_uses:
            reason = "used up"
        elif await sandbox.reset():
            self.counts["reset"] += 1
            self._idle.append(sandbox)
            await self._notify()
            return
        else:
            reason = "reset failed"
        self._destroy(sandbox, reason)
        await self._refill(sandbox.shape)

    async def _refill(self, shape: Shape) -> None:
        while self._lending and len(self._alive) + self._starting < self._size:
            try:
                self._idle.append(await self._start(shape))
                await self._notify()
            except PoolClosed:
                return
            except EvalpoolError as error:
                log.warning("a sandbox could not be started: %s", error, extra={"action": "refill_failed"})
                await asyncio.sleep(REFILL_PAUSE)

    def _destroy(self, sandbox: Box, reason: str) -> None:
        self._alive.discard(sandbox)
        self.counts[f"destroyed: {reason}"] += 1
        self._spawn(sandbox.close())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
