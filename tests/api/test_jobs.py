"""A submission is validated as a whole, committed at once, and then announced in Redis."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from sqlalchemy import text

from evalpool.api import get_batch, get_job, jobs, submit_batch, submit_job
from evalpool.api.jobs import JobFields, submit_stream
from evalpool.schemas import (
    BatchNotFound,
    Case,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidJob,
    JobNotFound,
    JobSpec,
    Limits,
    QueueUnavailable,
    State,
    entries,
)
from evalpool.schemas.store import Store
from evalpool.worker.queue.celery import QUEUES
from tests.api.conftest import rows
from tests.conftest import PATIENCE, eventually

NOWHERE = "redis://127.0.0.1:1/0"

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "code"),
    ({"code": "x", "bogus": 1}, "bogus"),
    ({"code": "x", "tool": "perl_executor"}, "tool"),
    ({"code": "x", "limits": {"cpu_seconds": -1}}, "cpu_seconds"),
    ({"code": "x", "files": {"/etc/passwd": ""}}, "files"),
    ({"code": "x", "files": {"a/../../b": ""}}, "files"),
    ({"code": "x" * (11 << 20)}, "code"),
    ({"code": "x", "check": "assert 1", "cases": [{"stdin": "", "expected": ""}]}, "cases"),
]


def messages(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return sum(int(client.llen(name)) for name in QUEUES.values())


def states(store: Store) -> dict[str, int]:
    """Return how many jobs are in which state."""
    with store.database.read() as db:
        return dict(db.execute(text("SELECT state, count(*) FROM jobs GROUP BY state")).all())


@pytest.mark.parametrize(("fields", "named"), WRONG, ids=[named for _, named in WRONG])
def test_an_invalid_job_is_refused_by_its_field_and_leaves_no_row(
    store: Store, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidJob, match=named):
        submit_job(**fields)
    with pytest.raises(InvalidJob, match=rf"^job 1: .*{named}"):
        submit_batch([{"code": "fine"}, fields])
    assert rows(store) == 0


def test_the_keyword_arguments_of_submit_job_are_the_fields_of_a_job() -> None:
    assert list(JobFields.__annotations__) == list(JobSpec.model_fields)
    assert JobFields.__required_keys__ == {name for name, field in JobSpec.model_fields.items() if field.is_required()}


TOO_MUCH = r"limits\.memory_mib: 8192 is more than the 4096 that EVALPOOL_MAX_MEMORY_MIB allows"


def test_a_job_above_the_operators_ceiling_is_refused_and_the_limit_is_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALPOOL_MAX_MEMORY_MIB", "4096")
    large = JobSpec(code="x", limits=Limits(memory_mib=8192))
    with pytest.raises(InvalidJob, match=f"^{TOO_MUCH}$"):
        submit_job(large)
    with pytest.raises(InvalidJob, match=f"^job 1: {TOO_MUCH}$"):
        submit_batch([{"code": "fine"}, large])
    assert rows(store) == 0
    with pytest.raises(InvalidJob, match=f"^job 1: {TOO_MUCH}$"):
        submit_stream([JobSpec(code="fine"), large], 2)
    with store.database.read() as db:
        assert db.exec_driver_sql("SELECT count(*) FROM jobs").scalar_one() == 0


def test_an_empty_batch_is_refused(store: Store) -> None:
    with pytest.raises(InvalidJob, match="at least one"):
        submit_batch([])
    assert rows(store) == 0


def test_values_that_are_not_jobs_are_refused(store: Store) -> None:
    with pytest.raises(InvalidJob, match=r"job 0: .*not str"):
        submit_batch(["print(1)"])  # type: ignore[list-item]
    with pytest.raises(InvalidJob, match="not both"):
        submit_job(JobSpec(code="x"), code="y")


@pytest.mark.redis
def test_a_job_is_stored_and_queued(store: Store, redis_url: str) -> None:
    job = submit_job(code="print(1)", limits=Limits(cpu_seconds=1))
    assert job.state() is State.QUEUED
    assert get_job(job.id).batch_id == job.batch_id
    assert messages(redis_url) == 1


@pytest.mark.redis
def test_a_batch_takes_specs_and_mappings_and_keeps_their_order(store: Store, redis_url: str) -> None:
    given: list[Any] = [JobSpec(code="a", priority="low"), {"code": "b", "cases": [Case("1", "2")]}, {"code": "c"}]
    batch = submit_batch(iter(given), name="three")
    leased = sorted(store.claim(3, "me", 60).leases, key=lambda lease: lease.job_id)
    assert [lease.spec.code for lease in leased] == ["a", "b", "c"]
    assert store.batch(batch.id).name == "three"
    assert get_batch(batch.id).progress().total == 3


@pytest.mark.redis
def test_ids_sort_by_the_time_of_submission(store: Store, redis_url: str) -> None:
    assert len(submit_batch([{"code": "x"}]).id) == 22
    first = submit_job(code="x").id
    while (later := submit_job(code="x").id)[:12] == first[:12]:  # within the same millisecond
        pass
    assert first < later


def test_ids_of_the_same_millisecond_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 1_700_000_000_000_000_000)
    ours = {jobs._new_id() for _ in range(50_000)}
    assert len(ours) == 50_000
    monkeypatch.setattr("os.getpid", lambda: -1)  # a process that was forked
    assert ours.isdisjoint(jobs._new_id() for _ in range(100))


@pytest.mark.redis
def test_a_submission_whose_id_exists_leaves_that_batch_alone(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_batch([{"code": "another batch"}])
    first = submit_batch([{"code": "x"}])
    monkeypatch.setattr(jobs, "_new_id", lambda: first.id)
    for submit in (lambda: submit_batch([{"code": "y"}]), lambda: submit_stream([JobSpec(code="y")], 1)):
        with pytest.raises(DatabaseUnavailable):
            submit()
    assert states(store) == {"queued": 2}
    assert store.stored(first.id, 0, 9) == ['{"code":"x"}']


@pytest.mark.redis
def test_the_same_key_is_the_same_batch_and_queues_nothing_more(store: Store, redis_url: str) -> None:
    first = submit_batch([{"code": "x"}], idempotency_key="once")
    queued = messages(redis_url)
    again = submit_batch([{"code": "x"}], idempotency_key="once")
    assert again.id == first.id
    assert messages(redis_url) == queued
    assert rows(store) == 2


def test_without_redis_the_rows_stay_and_the_error_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALPOOL_REDIS_URL", NOWHERE)
    with pytest.raises(QueueUnavailable) as caught:
        submit_batch([{"code": "x"}, {"code": "y"}])
    assert get_batch(caught.value.batch_id).progress().queued == 2
    assert len(store.claim(9, "w", 60).leases) == 2


@pytest.mark.redis
def test_a_frozen_redis_does_not_delay_the_commits_of_others(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, go = threading.Event(), threading.Event()

    def freeze(*_: object) -> None:
        frozen.set()
        assert go.wait(PATIENCE)

    monkeypatch.setattr(jobs, "wake", freeze)
    with ThreadPoolExecutor(2) as threads:
        submitted = [threads.submit(submit_job, code="x")]
        assert frozen.wait(PATIENCE)
        submitted.append(threads.submit(submit_job, code="y"))
        try:
            eventually(lambda: states(store) == {"queued": 2}, 10)
        finally:
            go.set()
        assert len({each.result(PATIENCE).id for each in submitted}) == 2


@pytest.mark.redis
def test_one_waiting_message_is_enough_for_any_number_of_jobs(store: Store, redis_url: str) -> None:
    for _ in range(20):
        submit_job(code="x")
    submit_batch([{"code": "x"}] * 7000)
    assert messages(redis_url) == 1


@pytest.mark.redis
def test_the_same_key_with_different_jobs_is_refused(store: Store, redis_url: str) -> None:
    first = submit_batch([{"code": "x"}, {"code": "y"}], idempotency_key="once")
    for other in ([{"code": "x"}], [{"code": "x"}, {"code": "z"}]):
        with pytest.raises(IdempotencyConflict, match=first.id):
            submit_batch(other, idempotency_key="once")
    assert rows(store) == 3


@pytest.mark.redis
def test_a_stream_that_is_resumed_with_different_jobs_is_refused(store: Store, redis_url: str) -> None:
    def interrupted() -> Iterator[JobSpec]:
        yield from (JobSpec(code=f"{n}") for n in range(5000))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit_stream(interrupted(), 6000, idempotency_key="stream")
    others = [JobSpec(code=f"{n}") for n in range(4999)] + [JobSpec(code="other")] * 1001
    with pytest.raises(IdempotencyConflict, match="job 4999 differs"):
        submit_stream(others, 6000, idempotency_key="stream")
    with pytest.raises(IdempotencyConflict, match="6000"):
        submit_stream(others, 7000, idempotency_key="stream")
    batch = submit_stream((JobSpec(code=f"{n}") for n in range(6000)), 6000, idempotency_key="stream")
    assert len(store.stored(batch.id, 0, 10_000)) == 6000


@pytest.mark.redis
def test_a_stream_that_is_resumed_with_fewer_jobs_than_are_stored_ends(store: Store, redis_url: str) -> None:
    specs = [JobSpec(code=f"{n}") for n in range(10)]
    batch = submit_stream(specs, 10, idempotency_key="stream")
    assert submit_stream(specs[:4], 10, idempotency_key="stream").id == batch.id
    assert len(store.stored(batch.id, 0, 20)) == 10


@pytest.mark.parametrize(("key", "left"), [(None, {"cancelled": 2}), ("again", {"queued": 2})])
def test_an_interrupted_stream_is_cancelled_unless_it_can_be_resumed(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch, key: str | None, left: dict[str, int]
) -> None:
    monkeypatch.setattr("evalpool.api.jobs.PART", 2)

    def interrupted() -> Iterator[JobSpec]:
        yield from [JobSpec(code="1"), JobSpec(code="2"), JobSpec(code="3")]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit_stream(interrupted(), 9, idempotency_key=key)
    assert states(store) == left


def test_an_interrupted_large_batch_is_cancelled(store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalpool.schemas.store.PART", 2)
    monkeypatch.setattr("evalpool.schemas.store.WHOLE", 2)
    add, calls = entries.add, []

    def interrupted(*args: Any, **kwargs: Any) -> set[str]:
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return add(*args, **kwargs)

    monkeypatch.setattr("evalpool.schemas.entries.add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit_batch([JobSpec(code="x")] * 5)
    assert states(store) == {"cancelled": 2}


@pytest.mark.parametrize("name", ["a\0b", "x" * 1001, "\ud800"])
def test_a_name_that_a_database_cannot_store_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidJob, match=r"^name: "):
        submit_batch([{"code": "x"}], name=name)
    with pytest.raises(InvalidJob, match=r"^idempotency_key: "):
        submit_batch([{"code": "x"}], idempotency_key=name)
    with pytest.raises(InvalidJob, match=r"^name: "):
        submit_stream([JobSpec(code="x")], 1, name=name)
    assert rows(store) == 0


def test_an_unknown_id_is_not_found(store: Store) -> None:
    with pytest.raises(JobNotFound, match="nobody-000000"):
        get_job("nobody-000000")
    with pytest.raises(BatchNotFound, match="nobody"):
        get_batch("nobody")


def test_a_stream_of_another_length_conflicts_even_if_no_job_of_the_first_is_stored_yet(
    store: Store, redis_url: str
) -> None:
    store.open_batch("b", 10, None, "key", {})
    with pytest.raises(IdempotencyConflict, match="it has 10 jobs, not 20"):
        submit_stream(iter([JobSpec(code="x")] * 20), 20, idempotency_key="key")
    assert store.stored("b", 0, 20) == []
