"""Group commit: nobody is told before the rows are safe, and a database that stumbles loses nothing."""

import asyncio
from collections.abc import Sequence

import pytest
import redis
from sqlalchemy.exc import DataError, OperationalError

from schemas import JobSpec, Result, Verdict
from schemas.settings import settings
from schemas.store import Store
from worker import recorder as module
from worker.announcer import Announcer
from worker.bell import Bell
from worker.evaluation import finished
from worker.ledger import Ledger
from worker.recorder import Recorder

pytestmark = pytest.mark.redis


class Stumbling(Store):
    """Fails its first commits."""

    def __init__(self, store: Store, failures: int) -> None:
        super().__init__(store.database)
        self.failures = failures
        self.groups: list[int] = []

    def record(self, results: Sequence[Result], writer: str = "") -> set[str]:
        if self.failures:
            self.failures -= 1
            raise OperationalError("COMMIT", {}, Exception("the disk is full"))
        self.groups.append(len(results))
        return super().record(results, writer)


@pytest.mark.parametrize("failures", [0, 2])
async def test_results_are_committed_in_groups_however_often_the_database_stumbles(
    store: Store, redis_url: str, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    store.add_batch("b", [JobSpec(code="x")] * 50, None, None)
    leases = store.claim(50, "w", 60).leases
    stumbling = Stumbling(store, failures)
    bell, ledger = Bell(redis_url), Ledger(stumbling)
    announcer = Announcer(settings())
    recorder = Recorder(ledger, announcer, lambda: 0)
    keeper = asyncio.create_task(recorder.keep())
    with bell.listen("b") as listener:
        await asyncio.gather(*(recorder.record(finished(lease, Verdict.PASSED, "", "w")) for lease in leases))
        assert store.progress("b").finished == 50
        assert sum(stumbling.groups) == 50
        assert len(stumbling.groups) < 50
        rung: set[str] = set()
        while len(rung) < 50:
            rung |= set(listener.wait(10) or ["nothing was rung"])
    assert rung == {lease.job_id for lease in leases}
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    bell.close()
    announcer.close()


async def test_a_second_result_is_dropped_and_its_bearer_goes_on(store: Store, redis_url: str) -> None:
    store.add_batch("b", [JobSpec(code="x")], None, None)
    (lease,) = store.claim(1, "w", 60).leases
    ledger = Ledger(store)
    announcer = Announcer(settings())
    recorder = Recorder(ledger, announcer, lambda: 0)
    keeper = asyncio.create_task(recorder.keep())
    await recorder.record(finished(lease, Verdict.PASSED, "", "w"))
    await recorder.record(finished(lease, Verdict.WRONG_ANSWER, "", "w"))
    assert [result.verdict for result in next(store.results(["b-000000"]), [])] == [Verdict.PASSED]
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    announcer.close()


class Picky(Store):
    """Cannot store one of the results."""

    def record(self, results: Sequence[Result], writer: str = "") -> set[str]:
        if any(result.job_id == "b-000003" for result in results):
            raise DataError("INSERT", {}, Exception("not a value of mine"))
        return super().record(results, writer)


async def test_a_result_that_cannot_be_stored_harms_no_other(store: Store, redis_url: str) -> None:
    store.add_batch("b", [JobSpec(code="x")] * 6, None, None)
    leases = store.claim(6, "w", 60).leases
    ledger = Ledger(Picky(store.database))
    announcer = Announcer(settings())
    recorder = Recorder(ledger, announcer, lambda: 0)
    keeper = asyncio.create_task(recorder.keep())
    records = (recorder.record(finished(lease, Verdict.PASSED, "", "w")) for lease in leases)
    ended = await asyncio.gather(*records, return_exceptions=True)
    assert [type(end) for end in ended].count(DataError) == 1
    assert store.progress("b").finished == 5
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    announcer.close()


@pytest.mark.parametrize("verdict", [Verdict.PASSED, Verdict.SANDBOX_ERROR, Verdict.CANCELLED])
async def test_workers_are_woken_for_the_twin_that_takes_the_place_of_its_leader(
    store: Store, redis_url: str, verdict: Verdict
) -> None:
    store.add_batch("b", [JobSpec(code="x")] * 2, None, None, ["same", "same"])
    (lease,) = store.claim(9, "w", 60).leases
    ledger, announcer = Ledger(Store(store.database)), Announcer(settings())
    recorder = Recorder(ledger, announcer, lambda: 0)
    keeper = asyncio.create_task(recorder.keep())
    await recorder.record(finished(lease, verdict, "", "w"))
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    announcer.close()
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("evalpool.normal") == (not verdict.scored)
    assert len(store.claim(9, "w", 60).leases) == (not verdict.scored)
