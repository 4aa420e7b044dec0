"""Waiting for results: the bell makes it quick, and the rows alone decide."""

import asyncio
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import redis

from evalpool.api import BatchHandle, Job, submit_batch, submit_job
from evalpool.api.connections import fleet
from evalpool.api.ear import Ear, Rings
from evalpool.schemas import JobSpec, Result, State, Verdict
from evalpool.schemas.fleet import Member
from evalpool.schemas.store import Store
from evalpool.worker.queue.notify import Bell, channel
from tests.api.conftest import Finish, record
from tests.conftest import PATIENCE, eventually

pytestmark = pytest.mark.redis


@pytest.fixture
def batch(store: Store, redis_url: str) -> BatchHandle:
    return submit_batch([{"code": "x", "task_id": index} for index in range(5)])


def ids(batch: BatchHandle) -> list[str]:
    return [f"{batch.id}-{seq:06d}" for seq in range(5)]


class Aside(threading.Thread):
    """Runs a call in a thread. `value` returns its result or raises its error."""

    def __init__(self, call: object) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.start()

    def run(self) -> None:
        self._value = self._call()  # type: ignore[operator]

    def value(self) -> object:
        self.join(30)
        return self._value


def test_the_result_of_a_finished_job_needs_no_redis(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit_job(code="x", task_id="t", labels={"model": "m"})
    record(store, [job.id], Verdict.WRONG_ANSWER)
    monkeypatch.setenv("EVALPOOL_REDIS_URL", "redis://127.0.0.1:1/0")
    result = job.result(timeout=0)
    assert (result.verdict, result.passed, result.task_id) == (Verdict.WRONG_ANSWER, False, "t")
    assert result.labels == {"model": "m"}
    assert job.state() is State.FINISHED


def test_a_waiting_caller_gets_the_result_when_the_bell_rings(finish: Finish, redis_url: str) -> None:
    job = submit_job(code="x")
    waiter = Aside(lambda: job.result(timeout=PATIENCE))
    finish([job.id])
    result = waiter.value()
    assert isinstance(result, Result)
    assert result.job_id == job.id


def test_a_missed_bell_delays_a_result_only_briefly(store: Store, redis_url: str) -> None:
    job = submit_job(code="x")
    waiter = Aside(lambda: job.result(timeout=PATIENCE))
    record(store, [job.id])
    assert isinstance(waiter.value(), Result)


NOISE = {
    "no text": b"\xff\xfe",
    "no JSON": b"not JSON",
    "nested too deep": b"[" * 100_000,
    "a number": b"1",
    "an object": b'{"a": 1}',
    "no strings": b"[1, null, [2]]",
    "half a character": b'["\\ud800"]',
    "jobs of another channel": b'["0123456789abffffff-000000"]',
    "longer than any ring": b'["' + b"x" * (2 << 20) + b'"]',
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_a_message_that_no_worker_sent_makes_a_client_read_the_rows(
    store: Store, batch: BatchHandle, redis_url: str, noise: bytes
) -> None:
    bell, rings = Bell(redis_url), Rings()
    with redis.Redis.from_url(redis_url) as client, Ear(bell).listen(batch.id, rings):
        eventually(lambda: rings.wait(0) is None)  # the subscription is confirmed
        assert client.publish(channel(batch.id), noise) >= 1
        bell.ring([ids(batch)[0]])
        assert rings.wait(30) is None
        assert rings.wait(30) == [ids(batch)[0]]
    bell.close()


def test_a_waiting_client_survives_messages_that_no_worker_sent(
    finish: Finish, batch: BatchHandle, redis_url: str
) -> None:
    waiter = Aside(lambda: sorted(result.job_id for result in batch.as_completed(timeout=PATIENCE)))
    with redis.Redis.from_url(redis_url) as client:
        eventually(lambda: client.pubsub_numsub(channel(batch.id))[0][1] >= 1)
        for noise in NOISE.values():
            client.publish(channel(batch.id), noise)
    finish(ids(batch))
    assert waiter.value() == ids(batch)


def test_a_job_that_does_not_finish_in_time_is_a_timeout(store: Store, redis_url: str) -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.3 seconds"):
        submit_job(code="x").result(timeout=0.3)
    assert 0.3 <= time.monotonic() - begun < 5


def test_a_timeout_names_the_progress_and_the_missing_worker(store: Store, redis_url: str) -> None:
    batch = submit_batch([{"code": "x"}] * 30)
    words = r"0 running, 30 queued; no worker has been seen for \d+ s \(`evalpool worker` starts one\)$"
    with pytest.raises(TimeoutError, match=rf"^batch {batch.id}: not finished after 1.5 seconds: {words}"):
        batch.wait(timeout=1.5)
    store.report(Member(name="w"))
    with store.database.write() as db:
        db.exec_driver_sql("UPDATE workers SET seen_at = seen_at - 60")
    eventually(lambda: not fleet().members)
    with pytest.raises(
        TimeoutError, match=r"^job .*-000003: .*: 0 running, 30 queued; no worker has been seen for 6\d s"
    ):
        Job(ids(batch)[3]).result(timeout=0)
    store.claim(4, "w", 60)
    store.report(Member(name="w", slots=2))
    eventually(lambda: fleet().members)
    with pytest.raises(TimeoutError, match="2 running, 28 queued"):
        batch.wait(timeout=0)


def test_a_ring_without_a_stored_result_is_ignored(store: Store, batch: BatchHandle, redis_url: str) -> None:
    bell = Bell(redis_url)
    record(store, ids(batch)[:2])
    arriving = batch.as_completed(timeout=0.5)
    assert [next(arriving).job_id, next(arriving).job_id] == ids(batch)[:2]
    bell.ring(ids(batch))
    with pytest.raises(TimeoutError):
        next(arriving)
    with pytest.raises(TimeoutError):
        batch.wait(timeout=0.2)
    bell.close()


def test_each_result_of_a_batch_comes_once_as_it_is_committed(batch: BatchHandle, finish: Finish) -> None:
    def arrivals() -> Iterator[str]:
        finish([ids(batch)[3]])
        for result in batch.as_completed(timeout=PATIENCE):
            yield result.job_id
            missing = [each for each in ids(batch) if each not in seen]
            if missing:
                finish([missing[-1]])
                finish([missing[-1]])  # a second ring is not a second result

    seen: list[str] = []
    for job_id in arrivals():
        seen.append(job_id)
        if len(seen) == 1:
            assert job_id == ids(batch)[3]
    assert sorted(seen) == ids(batch)
    assert len(seen) == 5


def test_as_completed_of_a_finished_batch_ends(batch: BatchHandle, finish: Finish) -> None:
    finish(ids(batch))
    assert [result.job_id for result in batch.as_completed(timeout=0)] == ids(batch)
    assert [result.job_id for result in batch.as_completed()] == ids(batch)


def test_wait_returns_when_the_last_result_is_stored(batch: BatchHandle, finish: Finish) -> None:
    finish(ids(batch)[:4])
    with pytest.raises(TimeoutError):
        batch.wait(timeout=0.1)
    waiter = Aside(lambda: batch.wait(timeout=PATIENCE))
    finish(ids(batch)[4:], Verdict.TIME_LIMIT)
    waiter.value()
    progress = batch.progress()
    assert progress.complete
    assert progress.verdicts == {Verdict.PASSED: 4, Verdict.TIME_LIMIT: 1}


def test_results_are_in_the_order_of_submission(batch: BatchHandle, finish: Finish) -> None:
    for job_id in reversed(ids(batch)):
        finish([job_id])
    assert [result.job_id for result in batch.results()] == ids(batch)
    assert [result.task_id for result in batch.results()] == [0, 1, 2, 3, 4]


def test_cancelling_ends_waiting_jobs(batch: BatchHandle, finish: Finish) -> None:
    finish(ids(batch)[:2])
    assert batch.cancel() == 3
    batch.wait(timeout=PATIENCE)
    assert batch.progress().verdicts == {Verdict.PASSED: 2, Verdict.CANCELLED: 3}
    assert batch.report().excluded == 3


def test_handles_can_be_pickled_and_copied(finish: Finish, redis_url: str) -> None:
    waited_for = submit_job(code="x")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(waited_for.result, PATIENCE)
        eventually(lambda: submit_job(code="x")._rings is not None)
        job = submit_job(code="x")  # it has heard of the job since before it was stored
        finish([waited_for.id, job.id])
        waiting.result()
    for copy in (pickle.loads(pickle.dumps(job)), deepcopy(job)):
        assert (copy.id, copy.batch_id) == (job.id, job.batch_id)
        assert copy.result(timeout=PATIENCE) == job.result(timeout=PATIENCE)
    batch = BatchHandle(job.batch_id)
    assert [pickle.loads(pickle.dumps(batch)).id, deepcopy(batch).id] == [batch.id] * 2


async def test_a_job_can_be_awaited(finish: Finish, redis_url: str) -> None:
    jobs = [submit_job(code="x") for _ in range(20)]
    waiting = asyncio.gather(*jobs)
    await asyncio.sleep(0)
    finish(job.id for job in jobs)
    assert [result.job_id for result in await waiting] == [job.id for job in jobs]


async def test_a_batch_can_be_iterated_asynchronously(batch: BatchHandle, finish: Finish) -> None:
    finish(ids(batch)[:1])
    seen = []
    async for result in batch:
        seen.append(result.job_id)
        if len(seen) < 5:
            finish([ids(batch)[len(seen)]])
    assert seen == ids(batch)


async def test_an_await_can_be_cancelled(store: Store, redis_url: str) -> None:
    waiting = asyncio.ensure_future(submit_job(code="x"))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 10)


async def test_blocking_calls_work_inside_a_running_loop(finish: Finish, redis_url: str) -> None:
    job = submit_job(code="x")
    finish([job.id])
    assert job.result(timeout=PATIENCE).passed


@pytest.mark.parametrize("how", ["job", "batch"])
def test_a_cancellation_wakes_a_worker_for_the_twins_it_leaves(store: Store, redis_url: str, how: str) -> None:
    store.add_batch("b", [JobSpec(code="x")] * 2, None, None, ["same", "same"])
    if how == "job":
        Job("b-000000").cancel()
        assert len(store.claim(9, "w", 60).leases) == 1
    else:
        BatchHandle("b").cancel()
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("evalpool.normal") == 1
