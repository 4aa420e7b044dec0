"""What nobody is at is announced again; what merely waits its turn is not."""

from collections.abc import Iterator

import pytest
import redis

from schemas import JobSpec
from schemas.settings import settings
from schemas.store import Store
from worker import celery, reconciler
from worker.announcer import Announcer
from worker.ledger import Ledger
from worker.reconciler import Reconciler

pytestmark = pytest.mark.redis

IDS = [f"b-{i:06d}" for i in range(3)]


@pytest.fixture
def looking(store: Store, redis_url: str) -> Iterator[Reconciler]:
    store.add_batch("b", [JobSpec(code="x")] * 3, None, None)
    ledger = Ledger(store)
    announcer = Announcer(ledger, settings())
    yield Reconciler(ledger, announcer, settings())
    announcer.close()


def queued(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return celery.backlog(client)


async def test_rows_that_were_committed_but_never_published_are_found(
    looking: Reconciler, store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await looking.look() == 0
    monkeypatch.setattr(reconciler, "GRACE_LOOKS", -1)
    assert await looking.look() == 3
    assert queued(redis_url) == 3
    assert await looking.look() == 0


async def test_a_silent_workers_jobs_are_announced_again(looking: Reconciler, store: Store, redis_url: str) -> None:
    store.mark_published(IDS)
    store.lease(2, "dead", -1)
    assert await looking.look() == 2
    assert queued(redis_url) == 2


async def test_an_emptied_queue_is_noticed_and_a_moving_one_left_alone(
    looking: Reconciler, store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "max", min, raising=False)
    monkeypatch.setattr(reconciler, "STALE_LOOKS", -1)
    celery.publish([(job_id, "normal") for job_id in IDS], 1)
    store.mark_published(IDS)
    assert [await looking.look() for _ in range(3)] == [0, 0, 0]
    assert queued(redis_url) == 3
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    assert [await looking.look() for _ in range(2)] == [0, 3]
    assert queued(redis_url) == 3


async def test_with_redis_away_nothing_is_marked(
    looking: Reconciler, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALPOOL_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setattr(reconciler, "GRACE_LOOKS", -1)
    with pytest.raises(celery.UNREACHABLE):
        await looking.look()
    assert len(store.unannounced(grace=-1, stale=None, limit=9)) == 3
