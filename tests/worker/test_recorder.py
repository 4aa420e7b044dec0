"""Group commits: callers are notified only when the rows are committed, and no result is lost if a commit fails."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import redis
from sqlalchemy.exc import DataError, OperationalError

from evalpool.api.ear import Ear, Rings
from evalpool.schemas import JobSpec, Result, Verdict
from evalpool.schemas.settings import settings
from evalpool.schemas.store import Store
from evalpool.worker import recorder as module
from evalpool.worker.evaluation import finished
from evalpool.worker.ledger import Ledger
from evalpool.worker.queue.announcer import Announcer
from evalpool.worker.queue.notify import Bell
from evalpool.worker.recorder import Recorder
from tests.conftest import PATIENCE

pytestmark = pytest.mark.redis


@asynccontextmanager
async def recording(store: Store) -> AsyncIterator[Recorder]:
    """A recorder that commits what it is given, until the block ends."""
    announcer = Announcer(settings())
    recorder = Recorder(Ledger(store), announcer, lambda: 0)
    keeper = asyncio.create_task(recorder.keep())
    try:
        yield recorder
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        announcer.close()


@pytest.mark.parametrize("failures", [0, 2])
async def test_results_are_committed_in_groups_even_if_the_first_commits_fail(
    store: Store, redis_url: str, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    record = Store.record

    def fail_at_first(store: Store, results: Sequence[Result], writer: str = "") -> set[str]:
        nonlocal failures
        if failures:
            failures -= 1
            raise OperationalError("COMMIT", {}, Exception("the disk is full"))
        groups.append(len(results))
        return record(store, results, writer)

    monkeypatch.setattr(Store, "record", fail_at_first)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    store.add_batch("b", [JobSpec(code="x")] * 50, None, None)
    leases = store.claim(50, "w", 60).leases
    bell = Bell(redis_url)
    async with recording(store) as recorder:
        rings = Rings()
        with Ear(bell).listen("b", rings):
            while rings.wait(10) is not None:  # until the subscription is confirmed
                pass
            await asyncio.gather(*(recorder.record(finished(lease, Verdict.PASSED, "", "w")) for lease in leases))
            assert store.progress("b").finished == 50
            assert sum(groups) == 50
            assert len(groups) < 50
            rung: set[str] = set()
            while len(rung) < 50:
                rung |= set(rings.wait(10) or ["nothing was rung"])
        assert rung == {lease.job_id for lease in leases}
    bell.close()


async def test_a_second_result_of_a_job_is_dropped_without_an_error(store: Store, redis_url: str) -> None:
    store.add_batch("b", [JobSpec(code="x")], None, None)
    (lease,) = store.claim(1, "w", 60).leases
    async with recording(store) as recorder:
        await recorder.record(finished(lease, Verdict.PASSED, "", "w"))
        await recorder.record(finished(lease, Verdict.WRONG_ANSWER, "", "w"))
        assert [result.verdict for result in next(store.results(["b-000000"]), [])] == [Verdict.PASSED]


async def test_a_result_that_cannot_be_stored_does_not_keep_others_from_being_stored(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Store.record

    def refuse_one(store: Store, results: Sequence[Result], writer: str = "") -> set[str]:
        if any(result.job_id == "b-000003" for result in results):
            raise DataError("INSERT", {}, Exception("not a valid value"))
        return record(store, results, writer)

    monkeypatch.setattr(Store, "record", refuse_one)
    store.add_batch("b", [JobSpec(code="x")] * 6, None, None)
    leases = store.claim(6, "w", 60).leases
    async with recording(store) as recorder:
        records = (recorder.record(finished(lease, Verdict.PASSED, "", "w")) for lease in leases)
        ended = await asyncio.gather(*records, return_exceptions=True)
        assert [type(end) for end in ended].count(DataError) == 1
        assert store.progress("b").finished == 5


async def test_a_result_that_fails_like_an_absent_database_holds_up_no_others(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, repaired = Store.record, False

    def refuse_one(store: Store, results: Sequence[Result], writer: str = "") -> set[str]:
        if not repaired and any(result.job_id == "b-000000" for result in results):
            raise OperationalError("INSERT", {}, Exception("it is too large"))
        return record(store, results, writer)

    monkeypatch.setattr(Store, "record", refuse_one)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    store.add_batch("b", [JobSpec(code="x")] * 6, None, None)
    leases = store.claim(6, "w", 60).leases
    async with recording(store) as recorder:
        first, *others = (
            asyncio.create_task(recorder.record(finished(lease, Verdict.PASSED, "", "w"))) for lease in leases
        )
        await asyncio.wait_for(asyncio.gather(*others), PATIENCE)
        assert not first.done()
        repaired = True
        await asyncio.wait_for(first, PATIENCE)
        assert store.progress("b").finished == 6


async def test_the_outputs_in_one_commit_are_bounded(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    record = Store.record

    def note(store: Store, results: Sequence[Result], writer: str = "") -> set[str]:
        groups.append(len(results))
        return record(store, results, writer)

    monkeypatch.setattr(Store, "record", note)
    monkeypatch.setattr(module, "CHARACTERS", 2000)
    store.add_batch("b", [JobSpec(code="x")] * 5, None, None)
    announcer = Announcer(settings())
    recorder = Recorder(Ledger(store), announcer, lambda: 0)
    results = [finished(lease, Verdict.PASSED, "", "w") for lease in store.claim(5, "w", 60).leases]
    waiting = [
        asyncio.create_task(recorder.record(result.model_copy(update={"stdout": "x" * 1000}))) for result in results
    ]
    await asyncio.sleep(0)
    keeper = asyncio.create_task(recorder.keep())
    await asyncio.gather(*waiting)
    assert groups == [2, 2, 1]
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    announcer.close()


@pytest.mark.parametrize("verdict", [Verdict.PASSED, Verdict.SANDBOX_ERROR, Verdict.CANCELLED])
async def test_a_worker_is_woken_for_the_twin_that_runs_in_place_of_its_leader(
    store: Store, redis_url: str, verdict: Verdict
) -> None:
    store.add_batch("b", [JobSpec(code="x")] * 2, None, None, ["same", "same"])
    (lease,) = store.claim(9, "w", 60).leases
    async with recording(Store(store.database)) as recorder:
        await recorder.record(finished(lease, verdict, "", "w"))
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("evalpool.normal") == (not verdict.scored)
    assert len(store.claim(9, "w", 60).leases) == (not verdict.scored)
