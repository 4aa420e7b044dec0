"""The pool with fake sandboxes: lending, resetting, replacing and closing."""

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalpool.schemas import SandboxLost
from evalpool.schemas.errors import NoSandbox, PoolClosed
from evalpool.worker.pool import Pool, preloaded, size
from evalpool.worker.sandbox.base import Box, Program, Shape
from evalpool.worker.sandbox.fake import FakeBox
from tests.conftest import PATIENCE

SHAPE, OTHER = Shape("a", 64, 8, 8), Shape("b", 64, 8, 8)
PROGRAM = Program(code=b"pass", main="main.py")


class Maker:
    """Makes and remembers fake sandboxes, and fails or waits when told to."""

    def __init__(self) -> None:
        self.made: list[FakeBox] = []
        self.failing = False
        self.bad: set[str] = set()
        """Images of which none can be made."""
        self.hold: asyncio.Event | None = None
        """Nothing is made before this is set."""
        self.starting: set[asyncio.Task[Any]] = set()
        self.most_alive = 0

    async def __call__(self, shape: Shape) -> Box:
        if self.failing or shape.image in self.bad:
            raise SandboxLost("told to fail")
        if self.hold is not None:
            task = asyncio.current_task()
            assert task is not None
            self.starting.add(task)
            await self.hold.wait()
        sandbox = FakeBox(shape)
        self.made.append(sandbox)
        await sandbox.start()
        self.most_alive = max(self.most_alive, self.alive)
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


@pytest.fixture
async def roomy(maker: Maker) -> AsyncIterator[Pool]:
    """A pool with room for several kinds."""
    made = Pool(maker, slots=2, max_uses=100, size=8)
    yield made
    await made.close()
    assert maker.alive == 0


async def use(pool: Pool, shape: Shape, **more: Any) -> None:
    async with pool.lend(shape, **more) as sandbox:
        assert sandbox.alive
        assert sandbox.shape == shape
        assert not (more.get("fresh") and sandbox.uses)
        sandbox.uses += 1
        await asyncio.sleep(0)


async def settled(pool: Pool, but: Collection[asyncio.Task[Any]] = ()) -> None:
    while tasks := pool._background - {*but}:
        await asyncio.gather(*tasks)


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


async def test_a_sandbox_of_another_kind_replaces_an_idle_one(pool: Pool, maker: Maker) -> None:
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


async def test_jobs_with_other_limits_share_a_sandbox(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    for memory in (64, 128, 256, 512) * 2:
        shape = replace(SHAPE, memory_mib=memory, processes=memory, extra_mib=memory)
        async with pool.lend(shape) as sandbox:
            assert sandbox.shape == shape
        await settled(pool)
    assert len(maker.made) == 3


@pytest.mark.parametrize("change", [{"image": "b"}, {"disk_mib": 9}, {"cpus": 2.0}, {"commands": 1}, {"home": "/x"}])
async def test_what_a_sandbox_is_born_with_makes_another_kind(pool: Pool, maker: Maker, change: dict[str, Any]) -> None:
    await pool.warm(SHAPE)
    other = replace(SHAPE, **change)
    async with pool.lend(other) as sandbox:
        assert (sandbox.shape, sandbox) == (other, maker.made[-1])
    assert len(maker.made) == 4


async def test_a_sandbox_that_has_the_limits_already_is_preferred(roomy: Pool, maker: Maker) -> None:
    large = replace(SHAPE, memory_mib=512)
    async with roomy.lend(SHAPE) as one, roomy.lend(large) as two:
        pass
    await settled(roomy)
    for shape, expected in ((SHAPE, one), (large, two), (large, two), (SHAPE, one)):
        async with roomy.lend(shape) as sandbox:
            assert sandbox is expected
        await settled(roomy)


async def test_a_sandbox_whose_limits_cannot_be_set_is_replaced_for_the_job(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)

    async def refuse(_: Shape) -> bool:
        return False

    for sandbox in maker.made:
        sandbox.limit = refuse  # type: ignore[method-assign]
    async with pool.lend(replace(SHAPE, memory_mib=4)) as lent:
        assert lent is maker.made[3]
        assert lent.shape.memory_mib == 4
    await settled(pool)
    assert (maker.alive, pool.counts["destroyed: limits not set"]) == (3, 1)


async def refuse(_: Shape) -> bool:
    return False


async def test_a_job_that_starts_a_sandbox_for_itself_leaves_others_to_those_that_wait(
    pool: Pool, maker: Maker
) -> None:
    await use(pool, SHAPE)
    await settled(pool)
    maker.made[0].limit = refuse  # type: ignore[method-assign]
    maker.hold = asyncio.Event()
    jobs = [asyncio.create_task(use(pool, replace(SHAPE, memory_mib=4)))]
    async with asyncio.timeout(PATIENCE):
        while not maker.starting:
            await asyncio.sleep(0)
        jobs.append(asyncio.create_task(use(pool, SHAPE)))
        while len(maker.starting) < 2:
            await asyncio.sleep(0)
        assert all(map(pool.begun, jobs))
        maker.hold.set()
        await asyncio.gather(*jobs)
    await settled(pool)
    assert [stock.own for stock in pool._stocks.values()] == [0]


@pytest.mark.parametrize("how", ["refused", "lost", "cancelled"])
async def test_a_job_whose_limits_cannot_be_set_holds_up_no_other(maker: Maker, how: str) -> None:
    failures: list[SandboxLost] = []

    async def make(shape: Shape) -> Box:
        if failures:
            raise failures.pop()
        return await maker(shape)

    async def limit(_: Shape) -> bool:
        tried.set()
        if how == "cancelled":
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)
        if how == "lost":
            raise OSError("a test")
        failures.append(SandboxLost("a test"))
        return False

    pool, tried = Pool(make, slots=1, max_uses=100, spare=0), asyncio.Event()
    await pool.warm(SHAPE)
    maker.made[0].limit = limit  # type: ignore[method-assign]
    first, second = (asyncio.create_task(use(pool, SHAPE)) for _ in range(2))
    await asyncio.wait_for(tried.wait(), PATIENCE)
    if how == "cancelled":
        first.cancel()
    await asyncio.wait((first,), timeout=PATIENCE)
    assert first.cancelled() or first.exception()
    await asyncio.wait_for(second, PATIENCE)
    await settled(pool)
    assert (maker.alive, pool.snapshot()["idle"]) == (1, 1)
    await pool.close()


async def test_kinds_stay_warm_beside_each_other(roomy: Pool, maker: Maker) -> None:
    for _ in range(5):
        for image in "abcd":
            async with roomy.lend(replace(SHAPE, image=image)):
                pass
            await settled(roomy)
    assert [sandbox.shape.image for sandbox in maker.made] == [*"abcd"]


async def test_the_kind_that_was_not_asked_for_longest_makes_room(roomy: Pool, maker: Maker) -> None:
    images = [*"abcdefgh"]  # as many as fit
    for image in [*images, "a", "new"]:
        async with roomy.lend(replace(SHAPE, image=image)):
            pass
        await settled(roomy)
    assert maker.alive == 8
    assert {sandbox.shape.image for sandbox in maker.made if sandbox.alive} == {*images, "new"} - {"b"}


async def test_a_job_that_waits_for_a_container_does_not_hold_up_the_others(roomy: Pool, maker: Maker) -> None:
    await roomy.warm(SHAPE)
    maker.hold = asyncio.Event()
    cold = [asyncio.create_task(use(roomy, replace(SHAPE, image=image))) for image in "xyz"]
    await asyncio.sleep(0)
    for _ in range(9):
        await asyncio.wait_for(use(roomy, SHAPE), PATIENCE)
        await settled(roomy, but=maker.starting)
    assert not any(task.done() for task in cold)
    maker.hold.set()
    await asyncio.wait_for(asyncio.gather(*cold), PATIENCE)


async def test_a_job_of_a_new_kind_is_served_although_others_wait_for_every_sandbox(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    served = False

    async def hot() -> None:
        while not served:
            await use(pool, SHAPE)

    crowd = [asyncio.create_task(hot()) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.wait_for(use(pool, OTHER), PATIENCE)
    served = True
    await asyncio.gather(*crowd)


async def test_more_kinds_than_sandboxes_are_all_served(pool: Pool, maker: Maker) -> None:
    jobs = [
        use(pool, replace(SHAPE, image=image), fresh=turn % 3 == 0, alone="batch" if turn % 5 == 0 else None)
        for turn in range(12)
        for image in "abcdefgh"
    ]
    await asyncio.wait_for(asyncio.gather(*jobs), PATIENCE)
    assert maker.most_alive <= 3


async def test_fresh_jobs_beside_warm_ones_of_the_same_kind_are_all_served(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    await asyncio.wait_for(asyncio.gather(*(use(pool, SHAPE, fresh=n % 2 == 0) for n in range(40))), PATIENCE)
    await settled(pool)
    assert (maker.most_alive, pool.snapshot()["idle"]) == (3, 3)


async def test_a_fresh_job_replaces_a_used_sandbox_if_there_is_no_other(maker: Maker) -> None:
    pool = Pool(maker, slots=1, max_uses=100, spare=0)
    for fresh in (False, True, False, True, True):
        await asyncio.wait_for(use(pool, SHAPE, fresh=fresh), PATIENCE)
        await settled(pool)
    assert maker.most_alive == 1
    await pool.close()


async def test_no_more_sandboxes_of_a_kind_are_made_than_slots_can_use(roomy: Pool, maker: Maker) -> None:
    await asyncio.gather(*(use(roomy, SHAPE) for _ in range(50)))
    await settled(roomy)
    assert len(maker.made) <= 3


async def test_the_error_of_a_kind_that_cannot_be_started_reaches_each_of_its_jobs(roomy: Pool, maker: Maker) -> None:
    maker.bad.add("bad")
    jobs = [asyncio.create_task(use(roomy, replace(SHAPE, image="bad" if n % 2 else "a"))) for n in range(6)]
    results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), PATIENCE)
    assert [type(result) for result in results] == [type(None), NoSandbox] * 3
    assert all(roomy.begun(job) for job in jobs)  # so that none is given back while its failure is recorded


async def test_a_cancelled_job_leaves_its_sandbox_to_the_next(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    async with pool.lend(SHAPE), pool.lend(SHAPE):
        waiting = [asyncio.create_task(use(pool, SHAPE)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert pool.snapshot()["idle"] == 1
    await asyncio.wait_for(use(pool, SHAPE), PATIENCE)
    await settled(pool)
    assert (len(maker.made), pool.snapshot()["idle"]) == (3, 3)


async def test_a_job_has_begun_while_its_sandbox_starts_and_when_it_has_a_slot(pool: Pool, maker: Maker) -> None:
    maker.hold = asyncio.Event()
    one, two = (asyncio.create_task(use(pool, SHAPE)) for _ in range(2))
    while not maker.starting:
        await asyncio.sleep(0)
    assert (pool.begun(one), pool.begun(two)) == (True, False)  # only one is being started
    maker.hold.set()
    await asyncio.gather(one, two)
    assert pool.begun(one)
    assert pool.begun(two)


def test_the_number_of_idle_sandboxes_is_bounded_by_the_slots_and_by_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for mib, expected in ((100_000, 10), (1024, 6), (10, 3)):
        monkeypatch.setattr(Path, "read_text", lambda _, mib=mib: f"MemFree: 1 kB\nMemAvailable: {mib << 10} kB\n")
        assert size(2, None) == expected
    assert size(2, 100) == 102


def test_the_number_of_sandboxes_that_have_imported_libraries_is_bounded_by_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for mib, expected in ((100_000, 97), (10_000, 9), (1024, 3)):
        monkeypatch.setattr(Path, "read_text", lambda _, mib=mib: f"MemFree: 1 kB\nMemAvailable: {mib << 10} kB\n")
        assert preloaded(2) == expected


async def test_sandboxes_that_have_imported_libraries_make_room_for_each_other(maker: Maker) -> None:
    pool = Pool(maker, slots=2, max_uses=100, size=12, preloaded=3)
    for turn in range(3):
        for image in "abcde":
            await use(pool, replace(SHAPE, image=image))
            for _ in range(2):  # none is there the first time
                async with pool.lend(replace(SHAPE, image=image, preload=("numpy",))):
                    pass
                await settled(pool)
            alive = [sandbox.shape for sandbox in maker.made if sandbox.alive]
            assert sum(bool(shape.preload) for shape in alive) <= 3
            assert turn == 0 or sum(not shape.preload for shape in alive) == 5
    ready = replace(SHAPE, image="e", preload=("numpy",))  # of which there is one, as it was used last
    await asyncio.wait_for(asyncio.gather(*(use(pool, ready) for _ in range(20))), PATIENCE)
    await settled(pool)
    assert sum(bool(sandbox.shape.preload) for sandbox in maker.made if sandbox.alive) <= 3
    await pool.close()


READY = replace(SHAPE, preload=("numpy",))


async def test_no_job_waits_until_a_sandbox_has_imported_something(pool: Pool, maker: Maker) -> None:
    await pool.warm(SHAPE)
    maker.hold = asyncio.Event()
    for _ in range(2):  # and no second one is started for it
        async with pool.lend(READY) as sandbox:
            assert sandbox.shape == SHAPE
    maker.hold.set()
    async with asyncio.timeout(PATIENCE):
        while not any(sandbox.shape == READY for sandbox in pool._alive):
            await asyncio.sleep(0)
    async with pool.lend(READY) as sandbox:
        assert sandbox.shape == READY
    assert sum(made.shape == READY for made in maker.made) == 1


async def test_jobs_that_wait_already_get_the_sandbox_that_has_imported_what_they_import(
    pool: Pool, maker: Maker
) -> None:
    """A worker claims short jobs in bulk, so most of them wait when the first of them makes the pool start one."""
    await pool.warm(SHAPE)
    shapes: list[Shape] = []
    go = asyncio.Event()

    async def job() -> None:
        async with pool.lend(READY) as sandbox:
            shapes.append(sandbox.shape)
            await go.wait()

    jobs = [asyncio.create_task(job()) for _ in range(8)]
    async with asyncio.timeout(PATIENCE):
        while not any(made.shape == READY for made in maker.made) or not shapes:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*jobs)
    assert shapes.count(READY) >= 4
    assert len(shapes) == 8


async def test_no_job_suffers_from_a_sandbox_that_could_not_import_something(pool: Pool, maker: Maker) -> None:
    ready = replace(OTHER, preload=("numpy",))
    maker.bad = {"b"}
    for _ in range(3):
        assert pool._at_hand(ready) == OTHER
        await asyncio.sleep(0)
    maker.bad = set()
    async with pool.lend(OTHER) as sandbox:
        assert sandbox.shape == OTHER
