"""Jobs are found without a message, and a step that fails does not stop the others."""

import asyncio
import threading
import time
from collections.abc import Iterator
from functools import wraps
from typing import Any

import pytest
import redis
from sqlalchemy import text

from evalpool.schemas import JobSpec, State
from evalpool.schemas.fleet import Member
from evalpool.schemas.settings import settings
from evalpool.schemas.store import Store
from evalpool.schemas.tables import Todo
from evalpool.worker.lease import Leases
from evalpool.worker.ledger import Ledger
from evalpool.worker.queue.announcer import Announcer
from evalpool.worker.queue.celery import QUEUES
from evalpool.worker.reconciler import Reconciler
from tests.conftest import eventually

pytestmark = pytest.mark.redis


class Looking:
    """A reconciler, and how often it made its worker look for jobs."""

    def __init__(self, store: Store) -> None:
        self.works = 0
        self.images = {"a:1": "sha256:1"}
        self.ledger = Ledger(store)
        self.announcer = Announcer(settings())
        self.reconciler = Reconciler(self.ledger, self.announcer, settings(), report=self._report, work=self._work)

    async def _report(self) -> Member:
        return Member(name="w", images=self.images)

    def _work(self) -> None:
        self.works += 1


@pytest.fixture
def looking(store: Store, redis_url: str) -> Iterator[Looking]:
    store.add_batch("b", [JobSpec(code="x")] * 3, None, None)
    made = Looking(store)
    yield made
    made.announcer.close()


def queued(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return sum(int(client.llen(queue)) for queue in QUEUES.values())  # type: ignore[arg-type]


async def test_every_look_makes_the_worker_claim_even_after_redis_was_flushed(
    looking: Looking, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await looking.reconciler.look()
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    await looking.reconciler.look()
    assert looking.works == 2


async def test_the_jobs_of_a_dead_worker_are_requeued_and_another_worker_is_woken(
    looking: Looking, store: Store, redis_url: str
) -> None:
    store.claim(2, "dead", -1)
    await looking.reconciler.look()
    assert [store.state(f"b-{n:06}") for n in range(3)] == [State.QUEUED] * 3
    eventually(lambda: queued(redis_url) == 1)  # one message for any number of jobs


async def test_a_step_that_fails_does_not_stop_the_others(
    looking: Looking, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> int:
        raise ValueError("a row that cannot be")

    monkeypatch.setattr(Store, "expire", broken)
    monkeypatch.setattr("evalpool.schemas.store.ABANDONED_SECONDS", -1)
    with store.database.write() as db:
        db.execute(text("UPDATE batches SET cancelled_at = 0, todo = :todo"), {"todo": Todo.CANCELLING})
    await looking.reconciler.look()
    assert store.progress("b").cancelled == 3
    assert looking.works == 1
    assert looking.reconciler.counts["failed"] == 1


async def test_a_worker_reports_its_images(looking: Looking, store: Store) -> None:
    await looking.reconciler.look()
    assert store.fleet(60).pin("a:1") == "a:1 sha256:1"


async def test_other_queries_run_between_the_parts_of_a_large_batch_that_is_finished(
    looking: Looking, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpool.schemas.store.PART", 1)
    monkeypatch.setattr("evalpool.schemas.store.ABANDONED_SECONDS", -1)
    with store.database.write() as db:
        db.execute(text("UPDATE batches SET todo = :todo, cancelled_at = 0"), {"todo": Todo.CANCELLING})
    seen: list[int] = []
    take_step = Store.take_step

    @wraps(take_step)
    def slow(*args: Any) -> int:
        time.sleep(0.1)
        return take_step(*args)

    async def ask() -> None:
        while not store.progress("b").complete:
            seen.append((await looking.ledger.call(Store.progress, "b")).done)

    monkeypatch.setattr(Store, "take_step", slow)
    async with asyncio.timeout(60):
        await asyncio.gather(looking.reconciler.look(), ask())
    assert {1, 2} <= set(seen)


async def test_leases_are_renewed_during_a_long_commit(looking: Looking, store: Store) -> None:
    (lease,) = store.claim(1, "w", 1).leases
    leases, over = Leases(looking.ledger, "w", 1), threading.Event()

    async def run() -> None:
        leases.hold(lease)
        await asyncio.sleep(3600)

    held = asyncio.create_task(run())
    keeper = asyncio.create_task(leases.keep())
    busy = asyncio.get_running_loop().run_in_executor(looking.ledger._thread, over.wait, 60)
    await asyncio.sleep(2)
    assert store.expire(3) == 0
    over.set()
    await busy
    for task in (keeper, held):
        task.cancel()
    await asyncio.gather(keeper, held, return_exceptions=True)


async def test_a_worker_that_seldom_polls_still_sends_heartbeats_in_time(
    looking: Looking, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom = settings().model_copy(update={"reconcile_seconds": 600.0, "lease_seconds": 1.0})
    reconciler = Reconciler(
        looking.ledger, looking.announcer, seldom, report=looking._report, work=looking._work
    )  # fmt: skip
    keeper = asyncio.create_task(reconciler.keep())
    await asyncio.sleep(2.5)
    assert len(store.fleet(seldom.lease_seconds).members) == 1
    assert looking.works == 1
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)


async def test_a_worker_is_set_to_work_only_if_jobs_wait(looking: Looking, store: Store) -> None:
    store.claim(3, "another", 3600)
    often = settings().model_copy(update={"reconcile_seconds": 0.1})
    reconciler = Reconciler(looking.ledger, looking.announcer, often, report=looking._report, work=looking._work)
    keeper = asyncio.create_task(reconciler.keep())
    await asyncio.to_thread(eventually, lambda: store.fleet(60).members)
    assert looking.works == 0
    store.add_batch("later", [JobSpec(code="x")], None, None)
    await asyncio.to_thread(eventually, lambda: looking.works)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    assert reconciler.counts["failed"] == 0


async def test_a_batch_that_was_interrupted_is_finished(
    looking: Looking, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpool.schemas.store.ABANDONED_SECONDS", -1)
    with store.database.write() as db:
        db.execute(text("UPDATE batches SET cancelled_at = 0, todo = :todo"), {"todo": Todo.CANCELLING})
    keeper = asyncio.create_task(looking.reconciler.keep())
    await asyncio.to_thread(eventually, lambda: store.progress("b").cancelled == 3)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)


async def test_a_heartbeat_is_written_at_once_if_the_images_have_changed(looking: Looking, store: Store) -> None:
    await looking.reconciler.look()
    store.retire("w")
    await looking.reconciler.look()
    assert not store.fleet(60).members  # nothing new, and the last heartbeat is recent
    looking.images = {"a:1": "sha256:2"}
    await looking.reconciler.look()
    assert store.fleet(60).pin("a:1") == "a:1 sha256:2"
