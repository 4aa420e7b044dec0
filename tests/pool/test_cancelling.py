"""A job that is cancelled, whatever it waits for, leaves the pool as if it had never run."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from evalpool.schemas.errors import PoolClosed
from evalpool.worker.pool import Pool
from evalpool.worker.sandbox.base import End, Note, Outcome, Program, Shape
from evalpool.worker.sandbox.fake import FakeBox
from evalpool.worker.turn import Turn
from tests.conftest import PATIENCE

SHAPE = Shape("a", 64, 8, 8)
PROGRAM = Program(code=b"pass", main="main.py", more=True)
DONE = Outcome(
    ended=End.ITSELF, exit_code=0, signal=None, checked=False, note=Note.NONE, stdout=b"", stderr=b"", stdout_total=0,
    stderr_total=0, wall_seconds=0, cpu_seconds=0, memory_bytes=0, oom_kills=0, processes=1,
)  # fmt: skip


class Slow(FakeBox):
    """Waits where it is told to, for a reply that does not come."""

    where = ""
    waiting: asyncio.Event

    async def run(self, program: Program) -> Outcome:
        self.uses += 1
        await self._wait("run")
        return DONE

    async def reset(self) -> bool:
        await self._wait("reset")
        return self.alive

    async def _wait(self, where: str) -> None:
        if Slow.where == where:
            Slow.waiting.set()
            await asyncio.get_running_loop().create_future()


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async def make(shape: Shape) -> Slow:
        sandbox = Slow(shape)
        await sandbox.start()
        return sandbox

    Slow.where, Slow.waiting = "", asyncio.Event()
    made = Pool(make, slots=2, max_uses=100)
    await made.warm(SHAPE)
    yield made
    await made.close()


async def whole(pool: Pool) -> None:
    """Wait until all sandboxes are idle, and see that a job gets one, and every slot."""
    Slow.where = ""
    async with asyncio.timeout(PATIENCE):
        while pool._background:
            await asyncio.wait(pool._background)
        state, (stock,) = pool.snapshot(), pool._stocks.values()
        assert (state["alive"], state["idle"], stock.alive, stock.resetting, stock.starting) == (3, 3, 3, 0, 0)
        async with pool.lend(SHAPE) as one, pool.lend(SHAPE) as two:
            assert one.alive
            assert two.alive


async def two_cases(pool: Pool, between: asyncio.Event | None = None) -> None:
    async with Turn(pool, SHAPE, max_uses=100) as turn:
        await turn.run(PROGRAM)
        if between is not None:
            Slow.waiting.set()
            await between.wait()
        await turn.run(PROGRAM)


@pytest.mark.parametrize("where", ["run", "reset", "between"])
async def test_a_job_that_is_cancelled_in_its_turn_leaves_the_pool_as_it_was(pool: Pool, where: str) -> None:
    Slow.where = where
    job = asyncio.create_task(two_cases(pool, asyncio.Event() if where == "between" else None))
    await asyncio.wait_for(Slow.waiting.wait(), PATIENCE)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    await whole(pool)
    assert pool.counts["destroyed: not reusable"] == (where != "between")


async def test_a_job_that_is_cancelled_while_it_waits_for_its_next_sandbox_leaves_the_pool_as_it_was(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpool.worker.turn.TURN_SECONDS", 0)
    between = asyncio.Event()
    job = asyncio.create_task(two_cases(pool, between))
    await asyncio.wait_for(Slow.waiting.wait(), PATIENCE)
    async with pool.lend(SHAPE):
        other = asyncio.create_task(two_cases(pool, asyncio.Event()))
        between.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not job.done()
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        other.cancel()
        await asyncio.wait((other,))
    await whole(pool)


async def test_a_turn_ends_with_its_sandbox_when_lending_stops(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    between = asyncio.Event()
    job = asyncio.create_task(two_cases(pool, between))
    await asyncio.wait_for(Slow.waiting.wait(), PATIENCE)
    pool.stop_lending()
    monkeypatch.setattr("evalpool.worker.turn.TURN_SECONDS", 0)
    between.set()
    await asyncio.wait_for(job, PATIENCE)  # it has its sandbox, and needs no other
    with pytest.raises(PoolClosed):
        await two_cases(pool)
    while pool._background:
        await asyncio.wait(pool._background)
    state = pool.snapshot()
    assert (state["alive"], state["idle"]) == (3, 3)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), OSError("a test")])
async def test_a_reset_that_fails_in_any_way_costs_the_sandbox_and_nothing_else(
    pool: Pool, error: BaseException
) -> None:
    async def fail() -> bool:
        raise error

    async with pool.lend(SHAPE) as sandbox:
        sandbox.reset = fail  # type: ignore[method-assign]
    await asyncio.wait(pool._background)
    await whole(pool)
    assert not sandbox.alive
    assert pool.counts["destroyed: reset failed"] == 1
