"""Which jobs a worker claims. There is a real ledger but no worker, and each test says what its jobs do."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from evalpool.schemas import JobSpec, Settings, Verdict, fleet, images
from evalpool.schemas.database import Database
from evalpool.schemas.lease import Claim, Lease
from evalpool.schemas.store import Store
from evalpool.worker.breaker import Breaker
from evalpool.worker.evaluation import finished
from evalpool.worker.intake import Intake
from evalpool.worker.inventory import Inventory
from evalpool.worker.lease import Leases, Stop
from evalpool.worker.ledger import Ledger
from evalpool.worker.pool import Pool
from evalpool.worker.queue.announcer import Announcer

IMAGE = "evalpool/python:3.11"
DIGEST = "sha256:" + "1" * 64
HERE = f"{IMAGE} {DIGEST}"

Run = Callable[[Lease], Coroutine[Any, Any, None]]


class Silent:
    """An announcer that only notes its messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def wake(self, what: str) -> None:
        self.said.append(what)


class Desk:
    """An intake and its parts."""

    def __init__(self, store: Store, run: Run, slots: int = 2) -> None:
        self.store, self.run = store, run
        self.settings = Settings(slots=slots, worker_name="w")
        self.announcer = Silent()
        self.ledger = Ledger(store)
        self.leases = Leases(self.ledger, "w", 60)
        self.inventory = Inventory(cast(Any, None))
        self.inventory.names, self.inventory.digests = {IMAGE: DIGEST}, frozenset([DIGEST])
        self.database = Breaker("the database", lambda: self.ledger.call(Store.ping))
        self.intake = Intake(
            self.settings, self.ledger, self.leases, cast(Announcer, self.announcer), self.inventory,
            cast(Pool, None), needs=(self.database,), run=self.one,
        )  # fmt: skip

    async def one(self, lease: Lease) -> None:
        try:
            await self.run(lease)
        finally:
            self.leases.drop(lease)
            self.intake.over()

    def add(self, batch_id: str, count: int = 1, image: str | None = HERE) -> None:
        specs = [JobSpec(code="x")] * count
        self.store.add_batch(batch_id, specs, None, None, None, None if image is None else [image] * count)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    database = Database(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield Store(database)
    database.close()


async def soon(condition: Callable[[], object], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def test_polling_finds_jobs_for_a_free_slot_while_another_job_takes_hours(store: Store) -> None:
    begun: list[str] = []

    async def run(lease: Lease) -> None:
        begun.append(lease.batch_id)
        if lease.batch_id == "hours":
            await asyncio.sleep(3600)

    async def story() -> None:
        desk = Desk(store, run)
        desk.add("hours")
        followed = asyncio.create_task(desk.intake.follow())
        await soon(lambda: begun)
        desk.add("short")  # and no message tells of it
        desk.intake.look()
        await soon(lambda: begun == ["hours", "short"])
        followed.cancel()

    asyncio.run(story())


def test_a_job_that_is_stopped_twice_does_not_end_the_wake_up_that_claimed_it(store: Store) -> None:
    begun: list[str] = []

    async def run(lease: Lease) -> None:
        begun.append(lease.batch_id)
        if lease.batch_id == "stopped":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(3600)  # it is being recorded

    async def story() -> None:
        desk = Desk(store, run)
        desk.intake._settings = desk.intake._settings.model_copy(update={"chunk": 1})  # so that more may be waiting
        desk.add("stopped")
        followed = asyncio.create_task(desk.intake.follow())
        await soon(lambda: begun)
        desk.add("next")
        for _ in range(2):
            desk.leases.stop(Stop.CANCELLED)
            await asyncio.sleep(0.05)
        await followed
        assert begun == ["stopped", "next"]

    asyncio.run(story())


def test_a_job_that_is_stopped_before_its_first_step_is_not_held_for_ever(store: Store) -> None:
    begun: list[str] = []

    async def run(lease: Lease) -> None:
        begun.append(lease.job_id)

    async def story() -> None:
        desk = Desk(store, run)
        desk.add("b")
        settle = desk.intake._settle

        async def settle_and_stop(claimed: list[Lease]) -> list[Lease]:
            # It comes before the first step of the tasks that are made next, as it may if the loop was held up.
            asyncio.get_running_loop().call_soon(desk.leases.stop, Stop.PUT_BACK)
            return await settle(claimed)

        desk.intake._settle = settle_and_stop  # type: ignore[method-assign]
        await desk.intake.follow()
        assert len(begun) == 1
        assert len(desk.leases) == 0

    asyncio.run(story())


def test_a_claim_skips_a_bounded_number_of_absent_images(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalpool.worker.inventory.MOST_ABSENT", 10)
    absent = [f"nobody/has:{n}" for n in range(100)]
    store.add_batch("b", [JobSpec(code="x")] * 100, None, None, None, absent)
    begun: list[str] = []

    async def run(lease: Lease) -> None:
        begun.append(lease.batch_id)

    async def story() -> None:
        desk = Desk(store, run)
        desk.add("c")
        await desk.intake.follow()
        assert len(desk.inventory.absent) == 10
        desk.announcer.said.clear()
        await desk.intake.follow()
        assert desk.announcer.said == []  # nothing was claimed again

    asyncio.run(story())
    assert begun == ["c"]
    assert len(store.claim(200, "another", 60).leases) == 100


def test_a_worker_asks_again_for_jobs_that_were_locked_when_it_was_woken(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    locked = iter([Claim([], {}, passed_over=True)] * 3)
    claim = Store.claim

    def claim_later(*args: Any, **kwargs: Any) -> Claim:
        return next(locked, None) or claim(*args, **kwargs)

    monkeypatch.setattr(Store, "claim", claim_later)

    async def run(lease: Lease) -> None:
        begun.append(lease.batch_id)

    async def story() -> None:
        desk = Desk(store, run)
        desk.add("b")
        await desk.intake.follow()

    asyncio.run(story())
    assert begun == ["b"]


@pytest.mark.parametrize(
    ("image", "profile", "same"),
    [
        (HERE, fleet.profile(Settings()), True),
        (IMAGE, fleet.profile(Settings()), False),  # no worker was there that could say which image it is
        (HERE, "cold runsc", False),  # workers were there that are gone by now
    ],
)
def test_a_result_is_shared_with_later_batches_only_if_it_was_made_as_the_submitter_expected(
    store: Store, image: str, profile: str, same: bool
) -> None:
    spec = JobSpec(code="x")
    digest = spec.digest(images.made_by(image, profile))

    async def run(lease: Lease) -> None:
        store.record([finished(lease, Verdict.PASSED, "", "w")])

    async def story() -> None:
        store.add_batch("b", [spec, spec], None, None, [digest, digest], [image, image])
        await Desk(store, run).intake.follow()

    asyncio.run(story())
    assert store.progress("b").verdicts == {Verdict.PASSED: 2}  # within the batch, they share it all the same
    assert store.known([digest]) == ({digest: "b-000000"} if same else {})


class Full:
    """A pool in which only the first few jobs get a sandbox."""

    def __init__(self) -> None:
        self.first: set[asyncio.Task[Any]] = set()

    def begun(self, task: "asyncio.Task[Any]") -> bool:
        return task in self.first


def test_jobs_that_have_waited_too_long_here_are_not_claimed_again_at_once(store: Store) -> None:
    pool = Full()
    desk: Desk
    given_back: list[str] = []

    async def run(lease: Lease) -> None:
        if len(pool.first) < 2 and (task := asyncio.current_task()):
            pool.first.add(task)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if desk.leases.stopped(lease) is not Stop.PUT_BACK:
                raise
            given_back.append(lease.job_id)
            store.put_back([lease], "w")

    async def story() -> None:
        nonlocal desk
        desk = Desk(store, run)
        desk.intake._pool = cast(Pool, pool)
        desk.add("b", 10)
        tasks = [asyncio.create_task(desk.intake.follow()), asyncio.create_task(desk.intake.keep())]
        for _ in range(40):  # as if each message came back to this worker
            await asyncio.sleep(0.1)
            tasks.append(asyncio.create_task(desk.intake.follow()))
        assert len(given_back) == len(set(given_back)) == 8
        assert len(desk.leases) == 2
        for task in tasks:
            task.cancel()

    asyncio.run(story())


def test_the_log_says_once_that_the_same_job_is_given_back_again_and_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("evalpool.worker.intake.IDLE_SECONDS", 0.05)
    caplog.set_level("INFO", "evalpool")
    desk: Desk
    given_back: list[str] = []

    class Busy:
        def begun(self, task: object) -> bool:
            return False

    async def run(lease: Lease) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            given_back.append(lease.job_id)
            store.put_back([lease], "w")

    async def story() -> None:
        nonlocal desk
        desk = Desk(store, run)
        desk.intake._pool = cast(Pool, Busy())
        desk.add("b")

        async def follow_again_and_again() -> None:
            while True:
                await desk.intake.follow()

        tasks = [asyncio.create_task(follow_again_and_again()), asyncio.create_task(desk.intake.keep())]
        await soon(lambda: len(given_back) >= 3)
        for task in tasks:
            task.cancel()

    asyncio.run(story())
    said = [record.getMessage() for record in caplog.records if "given back" in record.getMessage()]
    assert said == ["1 job is given back after waiting for a slot"]


def test_wake_ups_that_come_during_a_claim_share_the_next_one(store: Store) -> None:
    begun: list[str] = []

    async def run(lease: Lease) -> None:
        begun.append(lease.batch_id)

    async def story() -> None:
        desk = Desk(store, run)
        claim, claims, go = desk.leases.claim, 0, asyncio.Event()

        async def slowly(count: int, without: Collection[str]) -> Claim:
            nonlocal claims
            claims += 1
            found = await claim(count, without)
            await go.wait()
            return found

        desk.leases.claim = slowly  # type: ignore[method-assign]
        first = asyncio.create_task(desk.intake.follow())
        await soon(lambda: claims == 1)
        desk.add("late")  # the first claim may not have seen it
        others = [asyncio.create_task(desk.intake.follow()) for _ in range(5)]
        await soon(lambda: sum(each.done() for each in others) == 4)
        go.set()
        await asyncio.gather(first, *others)
        assert begun == ["late"]
        assert claims == 2

    asyncio.run(story())
