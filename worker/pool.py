"""Lends warm sandboxes. A sandbox that comes back is reset, or destroyed and replaced by a new one.

Everything here runs on one event loop and needs no lock. A *slot* is the right to run a job. A job gets a sandbox first
and then a slot, so that no slot waits for a container. Each kind of sandbox has a stock, which grows with the demand to
one more than there are slots, so that one can be reset while all slots work. All stocks together have a size, and the
idle sandboxes that have not been asked for longest make room for others.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

from evalpool.schemas.errors import EvalpoolError, NoSandbox, PoolClosed, SandboxLost, SetupError
from evalpool.worker.sandbox.base import Box, Shape
from evalpool.worker.stock import Stock, Wait

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
IDLE_PER_SLOT = 4
"""How many sandboxes beyond the slots are kept for each slot, if the settings do not say."""
IDLE_MIB, PRELOADED_MIB, IDLE_SHARE = 32, 128, 8
"""The memory of an idle sandbox, and of one that has imported libraries, with some to spare; and how many times as much
must be free for all of them."""


def size(slots: int, idle: int | None) -> int:
    """Return how many sandboxes a worker keeps at most. If `idle`, their number beyond the slots, is not given, it
    follows from the slots and from the free memory of this machine."""
    return slots + max(1, min(IDLE_PER_SLOT * slots, _fit(IDLE_MIB)) if idle is None else idle)


def preloaded(slots: int) -> int:
    """Return how many of them may have imported libraries, which follows from the free memory, too. Those that jobs
    use do not count for much: a job that imports a library needs memory for that in any case."""
    return max(slots + 1, _fit(PRELOADED_MIB))


def _fit(mib: int) -> int:
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return (int(free.split()[1]) >> 10) // IDLE_SHARE // mib


class Pool:
    """The warm sandboxes of one worker."""

    def __init__(
        self,
        make: Callable[[Shape], Awaitable[Box]],
        slots: int,
        max_uses: int,
        *,
        spare: int = 1,
        size: int | None = None,
        preloaded: int | None = None,
    ) -> None:
        """`spare` is how many sandboxes of one kind there may be beyond the slots, `size` how many of all kinds, and
        `preloaded` how many of these may have imported libraries."""
        self._make, self._max_uses, self._others = make, max_uses, slots - 1
        self._slots = asyncio.Semaphore(slots)
        self._alone = asyncio.Lock()
        """Held by a job that waits for all slots, as two of them would wait for each other."""
        self._stood: dict[str, int] = {}
        """Batch → how often the slots stood idle for it."""
        self._most = slots + spare
        self._size = max(self._most, size or 0)
        self._preloaded = self._size if preloaded is None else preloaded
        self._stocks: dict[Shape, Stock] = {}
        """Kind → its stock; the one that was asked for last is at the end."""
        self._alive: set[Box] = set()
        self._starting = 0
        self._numbers = itertools.count()
        self._changed = asyncio.Condition()
        self._background: set[asyncio.Task[None]] = set()
        self._lending = True
        self._begun: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.counts: Counter[str] = Counter()
        """How many sandboxes were created, lent and reset so far, and how many were destroyed for which reason."""

    async def warm(self, shape: Shape) -> None:
        """Fill the stock of a kind. Raises what the first sandbox raised that could not be started."""
        results = await asyncio.gather(*(self._start(shape) for _ in range(self._most)), return_exceptions=True)
        for result in results:
            if isinstance(result, Box):
                self._put(result)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    @asynccontextmanager
    async def lend(self, shape: Shape, *, fresh: bool = False, alone: str | None = None) -> AsyncIterator[Box]:
        """Lend a sandbox of this shape for one run. With `alone`, the name of a batch, no other sandbox is lent
        meanwhile, unless that takes too long or has happened too often for this batch. An exception in the body
        destroys the sandbox."""
        sandbox = await self._take(shape, fresh)
        lent = kept = False
        try:
            async with self._every_slot() if alone is not None and self._may_stand(alone) else self._slots:
                if not self._lending:
                    raise PoolClosed("this worker is shutting down")
                self._begin(asyncio.current_task())
                self.counts["lent"] += 1
                lent = True
                yield sandbox
                kept = not fresh
        finally:
            if lent:
                self._take_back(sandbox, kept)
            else:
                self._put(sandbox)

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
        """Whether this task has a slot, or has had one, or a sandbox is being started for it, or could not be. The
        start may take long, but no other worker would be faster."""
        if task in self._begun:
            return True
        served = (itertools.islice(stock.waits(), stock.coming) for stock in self._stocks.values() if stock.coming)
        return any(wait.task is task for wait in itertools.chain.from_iterable(served))

    def _begin(self, task: "asyncio.Task[Any] | None") -> None:
        if task is not None:
            self._begun.add(task)

    def stop_lending(self) -> None:
        """Lend no more sandboxes: jobs that run may finish, and jobs that wait get `PoolClosed`."""
        self._lending = False
        for stock in self._stocks.values():
            for wait in stock.waits():
                if not wait.got.done():
                    wait.got.set_exception(PoolClosed("this worker is shutting down"))
            stock.waiting.clear()
            stock.waiting_fresh.clear()

    async def close(self) -> None:
        """Destroy all sandboxes."""
        self.stop_lending()
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
        self._stocks.clear()

    def snapshot(self) -> dict[str, Any]:
        """The state of the pool, for people and monitors."""
        idle = {sandbox for stock in self._stocks.values() for sandbox in stock.idle}
        return {
            "size": self._size,
            "idle": len(idle),
            "alive": len(self._alive),
            "starting": self._starting,
            "lending": self._lending,
            "counts": dict(self.counts),
            "sandboxes": [
                {
                    "id": sandbox.id[:12],
                    "image": sandbox.shape.image,
                    "uses": sandbox.uses,
                    "idle": sandbox in idle,
                }
                for sandbox in self._alive
            ],
        }

    # -- who gets which sandbox --------------------------------------------------------------------

    async def _take(self, shape: Shape, fresh: bool) -> Box:
        """Wait for a sandbox of this kind, and set the limits of this shape on it."""
        if not self._lending:
            raise PoolClosed("this worker is shutting down")
        loop, now = asyncio.get_running_loop(), self._at_hand(shape)
        stock = self._stock(now)
        self._stocks[now.kind] = self._stocks.pop(now.kind)  # now the last one to make room
        wait = Wait(now, shape, fresh, next(self._numbers), asyncio.current_task(), loop.create_future())
        stock.queue(wait).append(wait)
        self._match()
        try:
            sandbox = await wait.got
        except asyncio.CancelledError:
            queue = self._stock(wait.shape).queue(wait)
            if wait in queue:
                queue.remove(wait)
            elif not wait.got.cancelled() and wait.got.exception() is None:
                self._put(wait.got.result())
            raise
        try:
            limited = await sandbox.limit(wait.shape)
        except BaseException:
            self._replace(sandbox, "limits not set")
            raise
        if limited:
            return sandbox
        self._destroy(sandbox, "limits not set")
        start = self._start(wait.shape, own=True)  # in its place
        self._begin(wait.task)
        self._match()
        try:
            return await start
        finally:
            self._match()

    def _at_hand(self, shape: Shape) -> Shape:
        """Return this shape or, if no sandbox has imported what it names, the same without imports, so that no job
        waits for them; then such a sandbox is started in the background."""
        stock = self._stock(shape)
        if not shape.preload or stock.alive:
            return shape
        if not stock.starting and self._make_room(stock):
            self._spawn(self._bring(self._start(shape), stock))
        return replace(shape, preload=())

    def _call_over(self, kind: Shape) -> None:
        """Let the jobs that would like a sandbox of this kind wait for one from now on. They may be many: a worker
        claims short jobs in bulk."""
        stock, others = self._stock(kind), self._stock(replace(kind, preload=()))
        for wait in [wait for wait in others.waits() if wait.wish.kind == kind]:
            others.queue(wait).remove(wait)
            wait.shape = wait.wish
            stock.queue(wait).append(wait)

    def _match(self) -> None:
        """Give idle sandboxes to the jobs that wait for them, and start what is missing; those that came first are
        served first. Called whenever something has changed, so that no job can be forgotten."""
        wanted = [stock for stock in self._stocks.values() if stock.wanted]
        for stock in sorted(wanted, key=Stock.turn) if len(wanted) > 1 else wanted:
            self._hand_out(stock)
            while (wait := stock.first()) and stock.lacks(self._most) and self._make_room(stock):
                self._spawn(self._bring(self._start(wait.shape), stock))

    def _hand_out(self, stock: Stock) -> None:
        for sandbox in [sandbox for sandbox in stock.idle if not sandbox.alive]:
            stock.idle.remove(sandbox)
            self._destroy(sandbox, "found dead")
            self._spawn(self._refill(sandbox.shape))
        while stock.idle and (wait := stock.first(fresh=not all(sandbox.uses for sandbox in stock.idle))):
            stock.queue(wait).popleft()
            if not wait.got.done():  # it may have been cancelled
                wait.got.set_result(stock.pick(wait))

    def _make_room(self, stock: Stock) -> bool:
        """Make room for one more sandbox in a stock; return False if that must wait."""
        if stock.count >= self._most:  # a fresh one is wanted, and only used ones are left
            stock.idle.remove(victim := next(sandbox for sandbox in stock.idle if sandbox.uses))
            self._destroy(victim, "fresh one wanted")
            return True
        crowded = self._crowded(stock)
        if not crowded and len(self._alive) + self._starting < self._size:
            return True
        idle = [other for other in self._stocks.values() if other.idle and (other.preloaded or not crowded)]
        # What other jobs wait for is taken away only for a job that would else never be served.
        unwanted = [other for other in idle if not other.wanted]
        if unwanted or (idle and (stock.waiting_fresh or not stock.count)):
            self._destroy((unwanted or idle)[0].idle.pop(0), "other kind wanted")
            return True
        return False

    def _crowded(self, stock: Stock) -> bool:
        """Whether this kind has imported libraries, and there are as many of such sandboxes as there may be."""
        return (
            stock.preloaded and sum(each.count for each in self._stocks.values() if each.preloaded) >= self._preloaded
        )

    def _put(self, sandbox: Box) -> None:
        """Note that a sandbox is ready to be lent."""
        self._stock(sandbox.shape).idle.append(sandbox)
        if sandbox.shape.preload:
            self._call_over(sandbox.shape.kind)
        self._match()

    def _stock(self, shape: Shape) -> Stock:
        if shape.kind not in self._stocks:
            for kind in [kind for kind, stock in self._stocks.items() if not (stock.count or stock.wanted)]:
                del self._stocks[kind]
            self._stocks[shape.kind] = Stock(bool(shape.preload))
        return self._stocks[shape.kind]

    # -- from birth to death -----------------------------------------------------------------------

    def _start(self, shape: Shape, *, own: bool = False) -> Coroutine[Any, Any, Box]:
        """Return a coroutine that starts a sandbox, which is counted from now on; if it is for a job's `own` use, no
        job that waits will get it."""
        stock = self._stock(shape)
        stock.starting += 1
        stock.own += own
        self._starting += 1

        async def start() -> Box:
            try:
                try:
                    sandbox = await self._make(shape)
                except SandboxLost as error:
                    raise NoSandbox(str(error)) from error
                if not self._lending:
                    await sandbox.close()
                    raise PoolClosed("the pool was closed while a sandbox started")
                self._alive.add(sandbox)
                self._stock(sandbox.shape).alive += 1  # its image may have been found only now
            finally:
                stock.starting -= 1
                stock.own -= own
                self._starting -= 1
                self._spawn(self._notify())
            self.counts["created"] += 1
            return sandbox

        return start()

    async def _bring(self, start: Coroutine[Any, Any, Box], stock: Stock) -> None:
        """Start a sandbox for the jobs that wait for its kind. If that fails, the job that has waited longest gets the
        error."""
        try:
            self._put(await start)
        except PoolClosed:
            return
        except Exception as error:
            if (wait := stock.first()) is not None:
                stock.queue(wait).popleft()
                if not wait.got.done():
                    self._begin(wait.task)  # it was tried, and is not to be left to another worker
                    wait.got.set_exception(error)
            else:
                log.warning("a sandbox could not be started: %s", error, extra={"action": "start_failed"})
            self._match()

    def _take_back(self, sandbox: Box, kept: bool) -> None:
        """Reset a sandbox, or replace it, in the background, while the slot goes on with another one."""
        if not kept:
            self._replace(sandbox, "not reusable")
        elif sandbox.suspect:
            self._replace(sandbox, "abnormal end")
        elif sandbox.uses >= self._max_uses:
            self._replace(sandbox, "used up")
        else:
            self._stock(sandbox.shape).resetting += 1
            self._spawn(self._reset(sandbox))

    async def _reset(self, sandbox: Box) -> None:
        clean = False
        try:
            clean = await sandbox.reset()
        except SandboxLost:
            pass
        finally:  # also if the reset has failed in a way that nobody thought of
            self._stock(sandbox.shape).resetting -= 1
            if clean:
                self.counts["reset"] += 1
                self._put(sandbox)
            else:
                self._replace(sandbox, "reset failed")

    def _replace(self, sandbox: Box, reason: str) -> None:
        self._destroy(sandbox, reason)
        self._match()
        self._spawn(self._refill(sandbox.shape))

    async def _refill(self, shape: Shape) -> None:
        """Start a sandbox in the place of one that was destroyed after its use, unless waiting jobs took its place."""
        while self._lending and len(self._alive) + self._starting < self._size:
            stock = self._stock(shape)
            if stock.count >= self._most or self._crowded(stock):
                return
            try:
                self._put(await self._start(shape))
                return
            except (PoolClosed, SetupError):  # no other attempt would do better
                return
            except EvalpoolError as error:
                log.warning("a sandbox could not be started: %s", error, extra={"action": "refill_failed"})
                await asyncio.sleep(REFILL_PAUSE)

    def _destroy(self, sandbox: Box, reason: str) -> None:
        self._alive.discard(sandbox)
        self._stock(sandbox.shape).alive -= 1
        self.counts[f"destroyed: {reason}"] += 1
        self._spawn(sandbox.close())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
