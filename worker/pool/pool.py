"""Warm sandboxes: lend one, take it back as good as new, or destroy it and make another.

Everything here runs on one event loop and so needs no lock. A *slot* is the right to run a job; there is one sandbox
more than there are slots, so that one can be reset or made anew while all slots work.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from weakref import WeakSet

from schemas.errors import EvalpoolError, NoSandbox, SandboxLost
from worker.sandbox.base import Sandbox, Shape

log = logging.getLogger("evalpool.pool")

REFILL_PAUSE = 2.0
"""Seconds between tries to make a sandbox in the background when that fails."""
CLOSE_SECONDS = 5.0
ALONE_SECONDS = 10.0
"""How long slots may stand idle for the sake of one job that is to run alone."""


class PoolClosed(EvalpoolError):  # noqa: N818
    """The pool lends no more; the job goes back to the queue."""


class Pool:
    """Get, put, close."""

    def __init__(
        self, make: Callable[[Shape], Awaitable[Sandbox]], slots: int, max_uses: int, *, spare: int = 1
    ) -> None:
        self._make, self._max_uses, self._others = make, max_uses, slots - 1
        self._slots = asyncio.Semaphore(slots)
        self._alone = asyncio.Lock()
        """Two that wait for all slots would wait for each other."""
        self._size = slots + spare
        self._idle: list[Sandbox] = []
        self._alive: set[Sandbox] = set()
        self._starting = 0
        self._changed = asyncio.Condition()
        self._background: set[asyncio.Task[None]] = set()
        self._lending = True
        self._begun: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.counts: Counter[str] = Counter()
        """What has happened so far: created, lent, reset, and why sandboxes were destroyed."""

    async def warm(self, shape: Shape) -> None:
        """Fill the pool; raises what the first failing sandbox raised."""
        results = await asyncio.gather(*(self._start(shape) for _ in range(self._size)), return_exceptions=True)
        for result in results:
            if isinstance(result, Sandbox):
                self._idle.append(result)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    @asynccontextmanager
    async def lend(self, shape: Shape, *, fresh: bool = False, alone: bool = False) -> AsyncIterator[Sandbox]:
        """A sandbox of this shape, for one run; `alone`: while no other one is lent, if that comes about in time. An
        exception in the body destroys it."""
        async with self._every_slot() if alone else self._slots:
            if (task := asyncio.current_task()) is not None:
                self._begun.add(task)
            sandbox = await self._take(shape, fresh)
            self.counts["lent"] += 1
            kept = False
            try:
                yield sandbox
                kept = not fresh
            finally:
                # In the background: the slot goes on with another sandbox meanwhile.
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

    def begun(self, task: "asyncio.Task[Any]") -> bool:
        """Whether this task has got a slot by now: a sandbox is lent to it, or is being made for it, which may take
        longer than anybody would have it wait, but has to be done by somebody."""
        return task in self._begun

    def stop_lending(self) -> None:
        """Let the running jobs finish, and turn away the waiting ones."""
        self._lending = False
        self._spawn(self._notify())

    async def close(self) -> None:
        """Destroy everything."""
        self._lending = False
        closing = [asyncio.ensure_future(sandbox.close()) for sandbox in self._alive]
        # What is under way gets a moment to end by itself: a container half made would be left behind.
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
        """How the pool is, for people and monitors."""
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

    async def _take(self, shape: Shape, fresh: bool) -> Sandbox:
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

    def _pick(self, shape: Shape, fresh: bool) -> Sandbox | None:
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

    async def _start(self, shape: Shape) -> Sandbox:
        self._starting += 1
        try:
            try:
                sandbox = await self._make(shape)
            except SandboxLost as error:
                raise NoSandbox(str(error)) from error
            if not self._lending:
                await sandbox.close()
                raise PoolClosed("the pool was closed meanwhile")
            self._alive.add(sandbox)
        finally:
            self._starting -= 1
            self._spawn(self._notify())
        self.counts["created"] += 1
        return sandbox

    async def _take_back(self, sandbox: Sandbox, kept: bool) -> None:
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
                log.warning("a sandbox could not be made: %s", error, extra={"action": "refill_failed"})
                await asyncio.sleep(REFILL_PAUSE)

    def _destroy(self, sandbox: Sandbox, reason: str) -> None:
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
