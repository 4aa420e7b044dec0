"""The pool with fake sandboxes: lending, resetting, replacing and closing."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from evalpool.schemas import SandboxLost
from evalpool.schemas.errors import PoolClosed
from evalpool.worker.pool import Pool
from evalpool.worker.sandbox.base import Box, Program, Shape
from evalpool.worker.sandbox.fake import FakeBox

SHAPE, OTHER = Shape("a", 64, 8, 8), Shape("b", 64, 8, 8)
PROGRAM = Program(code=b"pass", main="main.py")


class Maker:
    """Makes and remembers fake sandboxes, and fails when told to."""

    def __init__(self) -> None:
        self.made: list[FakeBox] = []
        self.failing = False

    async def __call__(self, shape: Shape) -> Box:
        if self.failing:
            raise SandboxLost("told to fail")
        sandbox = FakeBox(shape)
        self.made.append(sandbox)
        await sandbox.start()
        return sandbox

    @property
    def alive(self) -> int:
        return sum(sandbox.alive for sandbox in self.made)


@pytest.fixture
async def maker() -> Maker:
    return Maker()


@pytest.fixture
async def pool(maker: Maker) -> AsyncIterator[Pool]:
    made = Pool(maker, slots=2, max_uses=3)
    yield made
    await made.close()
    assert maker.alive == 0


async def settled(pool: Pool) -> None:
    while pool._background:
        await asyncio.gather(*pool._background)


async def test_a_warm_pool_has_one_sandbox_more_than_slots(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    assert (len(maker.made), pool.snapshot()["idle"]) == (3, 3)


async def test_a_sandbox_is_used_again_after_its_reset(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    for _ in range(6):
        async with pool.lend(SHAPE) as sandbox:
            await sandbox.run(PROGRAM)
        await settled(pool)
    assert len(maker.made) == 3
    assert pool.counts["reset"] == 6


async def test_no_more_sandboxes_are_lent_at_once_than_there_are_slots(pool: Pool) -> None:
    await pool.warm(SHAPE)
    running = peak = 0

    async def job() -> None:
        nonlocal running, peak
        async with pool.lend(SHAPE):
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0.01)
            running -= 1

    await asyncio.gather(*(job() for _ in range(8)))
    assert peak == 2


async def test_a_used_up_sandbox_is_replaced(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    for _ in range(12):
        async with pool.lend(SHAPE) as sandbox:
            await sandbox.run(PROGRAM)
        await settled(pool)
    assert pool.counts["destroyed: used up"] >= 3
    assert (maker.alive, pool.snapshot()["idle"]) == (3, 3)


async def test_a_suspect_sandbox_is_replaced(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    async with pool.lend(SHAPE) as sandbox:
        sandbox.suspect = True
    await settled(pool)
    assert not sandbox.alive
    assert (maker.alive, pool.counts["destroyed: abnormal end"]) == (3, 1)


async def test_an_error_in_the_body_destroys_the_sandbox(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    with pytest.raises(RuntimeError):
        async with pool.lend(SHAPE) as sandbox:
            raise RuntimeError
    await settled(pool)
    assert not sandbox.alive
    assert maker.alive == 3


async def test_a_fresh_sandbox_runs_one_program_only(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    seen = set()
    for _ in range(5):
        async with pool.lend(SHAPE, fresh=True) as sandbox:
            assert sandbox.uses == 0
            await sandbox.run(PROGRAM)
            seen.add(sandbox.id)
        await settled(pool)
    assert len(seen) == 5


async def test_a_sandbox_of_another_shape_replaces_an_idle_one(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    async with pool.lend(OTHER) as sandbox:
        assert sandbox.shape == OTHER
    await settled(pool)
    assert maker.alive == 3


async def test_a_dead_sandbox_is_not_lent(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    for sandbox in maker.made[:3]:
        await sandbox.close()
    async with pool.lend(SHAPE) as lent:
        assert lent.alive


async def test_a_sandbox_that_cannot_be_started_raises_an_error_and_is_tried_again(pool: Pool, maker: Maker) -> None:
    maker.failing = True
    with pytest.raises(SandboxLost):
        async with pool.lend(SHAPE):
            pass
    maker.failing = False
    async with pool.lend(SHAPE) as sandbox:
        assert sandbox.alive


async def test_when_lending_stops_running_jobs_finish_and_waiting_jobs_get_an_error(pool: Pool) -> None:
    await pool.warm(SHAPE)
    go = asyncio.Event()

    async def job() -> str:
        async with pool.lend(SHAPE):
            await go.wait()
            return "finished"

    jobs = [asyncio.create_task(job()) for _ in range(4)]
    await asyncio.sleep(0.05)
    pool.stop_lending()
    go.set()
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert results[:2] == ["finished", "finished"]
    assert all(isinstance(result, PoolClosed) for result in results[2:])
