"""Coroutines wait without threads of their own, submit without blocking the loop, and leave nothing behind."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

import api
from evalpool.api import BatchHandle, submit_batch, submit_job
from evalpool.schemas import BatchNotFound, InvalidJob, State
from evalpool.schemas.store import Store
from evalpool.worker.queue.notify import channel
from tests.api.conftest import Finish, record, rows
from tests.conftest import PATIENCE

pytestmark = pytest.mark.redis

MANY = 1000


@pytest.fixture
def client(redis_url: str) -> "redis.Redis":
    with redis.Redis.from_url(redis_url) as found:
        yield found


@pytest.fixture
async def busy_executor() -> AsyncIterator[None]:
    """Give the loop a default executor whose only thread is busy."""
    released = threading.Event()
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    executor.submit(released.wait)
    yield
    released.set()


async def soon(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.02)


def ids(batch: BatchHandle, count: int) -> list[str]:
    return [f"{batch.id}-{seq:06d}" for seq in range(count)]


async def test_an_awaited_batch_gives_its_results_in_the_order_of_submission(store: Store, finish: Finish) -> None:
    batch = submit_batch([{"code": "x", "task_id": index} for index in range(5)])
    waiting = asyncio.ensure_future(batch)
    for job_id in (ids(batch, 5)[place] for place in (3, 0, 4, 1, 2)):
        finish([job_id])
        await asyncio.sleep(0.02)
    results = await asyncio.wait_for(waiting, PATIENCE)
    assert [result.job_id for result in results] == ids(batch, 5)
    assert [result.index for result in results] == [0, 1, 2, 3, 4]
    assert [result.task_id for result in await batch] == [0, 1, 2, 3, 4]


async def test_a_result_knows_its_place_in_the_batch(store: Store, finish: Finish) -> None:
    batch = submit_batch([{"code": "x"}] * 3)
    for job_id in reversed(ids(batch, 3)):
        finish([job_id])
    assert [result.index for result in batch.as_completed(timeout=PATIENCE)] == [0, 1, 2]
    assert {result.index: result.job_id async for result in batch} == dict(enumerate(ids(batch, 3)))
    assert '"index":1' in batch.results()[1].model_dump_json()
    job = submit_job(code="x")
    finish([job.id])
    assert (await job).index == 0


async def test_a_thousand_awaits_share_one_connection_and_a_few_threads(
    store: Store, finish: Finish, client: "redis.Redis", busy_executor: None
) -> None:
    before, clients = threading.active_count(), len(client.client_list())
    jobs = [submit_job(code="x") for _ in range(10)]
    batch = submit_batch([{"code": "x"}] * MANY)
    handles = jobs + [api.Job(job_id) for job_id in ids(batch, MANY)]
    waiting = [asyncio.ensure_future(handle) for handle in handles] + [asyncio.ensure_future(batch) for _ in range(10)]
    await soon(lambda: client.pubsub_numsub(channel(batch.id))[0][1] == 1)
    assert threading.active_count() - before < 20
    assert len(client.client_list()) - clients < 10
    finish(handle.id for handle in handles)
    results = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE)
    assert [result.job_id for result in results[: len(handles)]] == [handle.id for handle in handles]
    assert all([result.index for result in each] == [*range(MANY)] for each in results[len(handles) :])
    await soon(lambda: not client.pubsub_channels("evalpool.*"))


@pytest.mark.parametrize("how", ["job", "batch", "each result"])
async def test_a_cancelled_await_leaves_nothing_behind(store: Store, client: "redis.Redis", how: str) -> None:
    batch = submit_batch([{"code": "x"}] * 2)

    async def each_result() -> None:
        async for _ in batch:
            pass

    async def one(number: int) -> object:
        waits = {"job": lambda: api.Job(ids(batch, 2)[number % 2]), "batch": lambda: batch, "each result": each_result}
        return await waits[how]()

    others = asyncio.all_tasks()
    for _ in range(3):
        waiting = [asyncio.ensure_future(one(number)) for number in range(50)]
        await soon(lambda: client.pubsub_channels("evalpool.*"))
        for task in waiting:
            task.cancel()
        async with asyncio.timeout(PATIENCE):
            assert all(
                isinstance(end, asyncio.CancelledError)
                for end in await asyncio.gather(*waiting, return_exceptions=True)
            )
        await soon(lambda: asyncio.all_tasks() == others and not client.pubsub_channels("evalpool.*"))
    assert batch.progress().queued == 2


async def test_leaving_the_loop_over_a_batch_early_leaves_nothing_behind(
    store: Store, finish: Finish, client: "redis.Redis"
) -> None:
    batch = submit_batch([{"code": "x"}] * 2)
    finish(ids(batch, 1))
    others = asyncio.all_tasks()
    async for result in batch:
        assert result.index == 0
        break
    await soon(lambda: asyncio.all_tasks() == others and not client.pubsub_channels("evalpool.*"))


async def test_an_await_ends_without_redis(store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = submit_batch([{"code": "x"}] * 2)
    monkeypatch.setenv("EVALPOOL_REDIS_URL", "redis://127.0.0.1:1/0")
    waiting = asyncio.ensure_future(batch)
    await asyncio.sleep(0.1)
    record(store, ids(batch, 2))
    assert len(await asyncio.wait_for(waiting, PATIENCE)) == 2


async def test_an_await_hears_the_bell_again_after_redis_cut_it_off(
    store: Store, finish: Finish, client: "redis.Redis"
) -> None:
    job = submit_job(code="x")
    waiting = asyncio.ensure_future(job)
    await soon(lambda: client.pubsub_channels("evalpool.*"))
    client.client_kill_filter(_type="pubsub")
    await soon(lambda: client.pubsub_channels("evalpool.*"))
    finish([job.id])
    assert (await asyncio.wait_for(waiting, PATIENCE)).job_id == job.id


async def test_errors_while_a_coroutine_waits_are_raised_in_it(store: Store, redis_url: str) -> None:
    with pytest.raises(BatchNotFound):
        await BatchHandle("nowhere")


async def test_submitting_does_not_block_the_loop(store: Store, redis_url: str, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "ledger.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        batch = asyncio.ensure_future(api.submit_batch_async([{"code": "x"}] * 3, name="b"))
        job = asyncio.ensure_future(api.submit_job_async(code="x", task_id="t"))
        await asyncio.sleep(0.2)
        assert not batch.done()
        assert not job.done()
        other.execute("COMMIT")
    other.close()
    assert (await asyncio.wait_for(batch, PATIENCE)).progress().total == 3
    assert (await asyncio.wait_for(job, PATIENCE)).state() is State.QUEUED


async def test_an_asynchronous_submission_refuses_the_same_jobs_as_a_synchronous_one(
    store: Store, redis_url: str
) -> None:
    with pytest.raises(InvalidJob, match="bogus"):
        await api.submit_job_async(code="x", bogus=1)
    with pytest.raises(InvalidJob, match="job 1: code"):
        await api.submit_batch_async([{"code": "x"}, {}])
    assert rows(store) == 0


@pytest.mark.parametrize(("key", "left"), [(None, "cancelled"), ("mine", "queued")])
async def test_a_cancelled_submission_cancels_its_jobs_unless_it_has_an_idempotency_key(
    store: Store, redis_url: str, tmp_path: Path, key: str | None, left: str
) -> None:
    with sqlite3.connect(tmp_path / "ledger.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        submitting = asyncio.ensure_future(api.submit_batch_async([{"code": "x"}] * 2, idempotency_key=key))
        await asyncio.sleep(0.2)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(submitting, PATIENCE)
        other.execute("COMMIT")
    other.close()

    def states() -> list[str]:
        with store.database.read() as db:
            return [row.state for row in db.exec_driver_sql("SELECT state FROM jobs")]

    await soon(lambda: states() == [left] * 2)


async def test_short_waits_end_even_if_they_stop_listening_while_redis_connects(store: Store, finish: Finish) -> None:
    batch = submit_batch([{"code": "x"}] * 2)
    finish(ids(batch, 2))
    async with asyncio.timeout(PATIENCE):
        for _ in range(60):
            assert len(await batch) == 2
            await api.Job(ids(batch, 1)[0])
