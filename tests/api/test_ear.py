"""One thread with one connection hears the bell for all callers of a process."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from sqlalchemy import event

from evalpool.api import Job, submit_batch, submit_job
from evalpool.api.connections import ear
from evalpool.api.connections import store as own_store
from evalpool.api.ear import Ear, Rings
from evalpool.schemas import JobSpec
from evalpool.schemas.store import Store
from evalpool.worker.queue.notify import channel
from tests.api.conftest import Finish
from tests.conftest import PATIENCE, eventually

pytestmark = pytest.mark.redis

CALLERS = 32


def ears() -> int:
    return sum(thread.name == "evalpool-ear" for thread in threading.enumerate())


def listening() -> bool:
    """Whether this process would hear of a job that it submits now."""
    return ear().expect(submit_job(code="x").batch_id) is not None


def test_threads_that_wait_share_one_connection_which_is_closed_afterwards(
    store: Store, finish: Finish, redis_url: str
) -> None:
    eventually(lambda: not ears())
    jobs = [submit_job(code="x") for _ in range(CALLERS)]
    with redis.Redis.from_url(redis_url) as client, ThreadPoolExecutor(CALLERS) as threads:
        waiting = [threads.submit(job.result, PATIENCE) for job in jobs]
        eventually(lambda: client.pubsub_channels("evalpool.done.*"))
        assert len(client.client_list(_type="pubsub")) == 1
        assert ears() == 1
        finish([job.id for job in jobs])
        assert [each.result().job_id for each in waiting] == [job.id for job in jobs]
        eventually(lambda: not ears() and not client.client_list(_type="pubsub"))


def test_a_job_that_was_submitted_while_the_ear_listens_is_read_once(store: Store, finish: Finish) -> None:
    first = submit_job(code="x")
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(first.result, PATIENCE)
        eventually(listening)
        job = submit_job(code="x")
        finish([job.id])
        reads: list[str] = []

        def note(*args: Any) -> None:
            if threading.current_thread() is threading.main_thread():
                reads.append(args[2])

        event.listen(own_store().database.engine, "before_cursor_execute", note)
        try:
            assert job.result(timeout=PATIENCE).job_id == job.id
        finally:
            event.remove(own_store().database.engine, "before_cursor_execute", note)
        assert sum("FROM results" in read for read in reads) == 1
        finish([first.id])
        assert waiting.result().job_id == first.id


def test_a_second_wait_for_the_same_job_returns_at_once(store: Store, finish: Finish) -> None:
    first = submit_job(code="x")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(first.result, PATIENCE)
        eventually(listening)
        job = submit_job(code="x")
        finish([job.id, first.id])
        assert job.result(timeout=PATIENCE) == job.result(timeout=PATIENCE) == Job(job.id).result(timeout=PATIENCE)
        waiting.result()


def test_waiting_goes_on_after_redis_has_cut_the_connection(store: Store, finish: Finish, redis_url: str) -> None:
    job = submit_job(code="x")
    with redis.Redis.from_url(redis_url) as client, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(job.result, PATIENCE)
        eventually(lambda: client.pubsub_channels("evalpool.done.*"))
        client.client_kill_filter(_type="pubsub")
        eventually(lambda: client.pubsub_channels("evalpool.done.*"))
        finish([job.id])
        assert waiting.result().job_id == job.id


def test_a_job_of_another_process_is_heard_of(store: Store, finish: Finish) -> None:
    foreign = "0123456789abffff000000"
    store.add_batch(foreign, [JobSpec(code="x")], None, None)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(Job(f"{foreign}-000000").result, PATIENCE)
        finish([f"{foreign}-000000"])
        assert waiting.result().batch_id == foreign


def wait_for(job: Job, finish: Finish) -> None:
    """Wait for a job in a thread, and finish the job as soon as the ear listens."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(job.result, PATIENCE)
        try:
            eventually(listening, 10)
        finally:
            finish([job.id])
        waiting.result()


def test_a_thread_that_cannot_be_started_leaves_the_ear_as_it_was(
    store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventually(lambda: not ears())
    job = submit_job(code="x")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            job.result(timeout=1)
    wait_for(job, finish)


def test_the_ear_listens_again_after_an_error_of_any_kind(
    store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    deliver = Ear._deliver

    def fail_once(ear: Ear, message: object) -> None:
        if not failed.is_set():
            failed.set()
            raise KeyError("a bug")
        deliver(ear, message)

    eventually(lambda: not ears())
    monkeypatch.setattr(Ear, "_deliver", fail_once)
    job = submit_job(code="x")
    wait_for(job, finish)
    assert failed.is_set()


def test_waiting_may_be_ended_by_the_garbage_collector_while_the_ear_is_locked(store: Store, redis_url: str) -> None:
    steps = submit_batch([{"code": "x"}]).watch(0)
    for _ in range(2):
        next(steps)  # the second one listens

    def collect() -> None:
        with ear()._lock:
            steps.close()  # type: ignore[attr-defined]

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    eventually(lambda: not ears())


def test_a_channel_on_which_nobody_waits_any_more_is_left(store: Store, finish: Finish, redis_url: str) -> None:
    foreign = "0123456789abffff000000"
    store.add_batch(foreign, [JobSpec(code="x")], None, None)
    job = submit_job(code="x")
    with redis.Redis.from_url(redis_url) as client, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(each.result, PATIENCE) for each in (job, Job(f"{foreign}-000000"))]
        eventually(lambda: len(client.pubsub_channels("evalpool.done.*")) == 2)
        finish([f"{foreign}-000000"])
        try:
            eventually(lambda: client.pubsub_channels("evalpool.done.*") == [channel(job.batch_id).encode()], 10)
        finally:
            finish([job.id])
        assert [each.result().job_id for each in waiting] == [job.id, f"{foreign}-000000"]


def test_a_message_is_divided_by_batches_whatever_its_order(store: Store, redis_url: str) -> None:
    batches = [submit_batch([{"code": "x"}] * 3).id for _ in range(2)]
    ids = [f"{batch}-{seq:06d}" for seq in range(3) for batch in batches]
    rings = [Rings(), Rings()]
    with ear().listen(batches[0], rings[0]), ear().listen(batches[1], rings[1]):
        message = {"type": "message", "channel": channel(batches[0]).encode(), "data": json.dumps(ids).encode()}
        ear()._deliver(message)
        for each, expected in zip(rings, (ids[::2], ids[1::2]), strict=True):
            while (heard := each.wait(PATIENCE)) is None:  # the subscription
                pass
            assert heard == expected


def test_a_handle_that_is_held_while_the_ear_ends_hears_of_it_once(store: Store, finish: Finish) -> None:
    held = None
    for _ in range(3):
        job = submit_job(code="x")
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(job.result, PATIENCE)
            eventually(listening)
            held = held or submit_job(code="x")
            finish([job.id])
            waiting.result()
        eventually(lambda: not ears())
    assert held is not None
    assert held._rings is not None
    assert held._rings._heard.qsize() == 1
    finish([held.id], ring=False)
    assert held.result(timeout=PATIENCE).job_id == held.id
