"""Jobs are found without a message, and a step that fails does not stop the others."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from sqlalchemy import text

from schemas import JobSpec, State
from schemas.fleet import Member
from schemas.settings import settings
from schemas.store import Store
from schemas.tables import CANCELLING
from tests.conftest import eventually
from worker.announcer import Announcer
from worker.celery import QUEUES
from worker.ledger import Ledger
from worker.reconciler import Reconciler

pytestmark = pytest.mark.redis


class Looking:
    """A reconciler, and how often it made its worker look for jobs."""

    def __init__(self, store: Store) -> None:
        self.works = 0
        self.ledger = Ledger(store)
        self.announcer = Announcer(settings())
        self.reconciler = Reconciler(self.ledger, self.announcer, settings(), report=self._report, work=self._work)

    async def _report(self) -> Member:
        return Member(name="w", images={"a:1": "sha256:1"})

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

    monkeypatch.setattr(store, "expire", broken)
    monkeypatch.setattr("schemas.store.ABANDONED_SECONDS", -1)
    with store.database.write() as db:
        db.execute(text("UPDATE batches SET cancelled_at = 0, todo = :todo"), {"todo": CANCELLING})
    await looking.reconciler.look()
    assert store.progress("b").cancelled == 3
    assert looking.works == 1
    assert looking.reconciler.counts["failed"] == 1


async def test_a_worker_reports_its_images(looking: Looking, store: Store) -> None:
    await looking.reconciler.look()
    assert store.fleet(60).pin("a:1") == "a:1 sha256:1"
