import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import event, text
from sqlmodel import SQLModel

from evalpool.schemas import (
    BatchNotFound,
    Case,
    CaseResult,
    JobNotFound,
    JobSpec,
    Metrics,
    Priority,
    Result,
    SchemaMismatch,
    State,
    Verdict,
    statements,
)
from evalpool.schemas.database import Database
from evalpool.schemas.entries import Single
from evalpool.schemas.fleet import Member
from evalpool.schemas.lease import Lease
from evalpool.schemas.rows import moment
from evalpool.schemas.store import Store
from tests.conftest import PATIENCE
from tests.faults.servers import PostgresServer

JOBS = [JobSpec(code=f"print({i})", task_id=f"t/{i}", sample_id=i) for i in range(4)]


def ids(batch: str, *seqs: int) -> list[str]:
    return [f"{batch}-{seq:06d}" for seq in seqs]


def result(lease: Lease, verdict: Verdict = Verdict.PASSED, **more: object) -> Result:
    return Result.model_validate(
        {
            "job_id": lease.job_id, "batch_id": lease.batch_id, "verdict": verdict, "attempt": lease.attempt,
            "created_at": moment(lease.created_at), "started_at": moment(lease.started_at),
            "finished_at": moment(lease.now),
            **more,
        }
    )  # fmt: skip


def test_a_batch_and_its_jobs_are_stored_together(store: Store) -> None:
    assert store.add_batch("b", JOBS, "name", None) == "b"
    assert (store.batch("b").name, store.batch("b").total) == ("name", 4)
    assert store.progress("b").queued == 4
    assert store.state("b-000003") is State.QUEUED


def test_an_unknown_id_raises_not_found(store: Store) -> None:
    with pytest.raises(BatchNotFound, match="'nope'"):
        store.batch("nope")
    with pytest.raises(JobNotFound, match="'nope-1'"):
        store.state("nope-1")


def test_a_second_submission_with_the_same_key_returns_the_first_batch(store: Store) -> None:
    assert store.add_batch("one", JOBS, None, "key") == "one"
    assert store.add_batch("two", JOBS, None, "key") == "one"
    with pytest.raises(BatchNotFound):
        store.batch("two")


def test_concurrent_submissions_with_the_same_key_create_one_batch(store: Store) -> None:
    got: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: got.append(store.add_batch(f"b{i}", JOBS, None, "key"))) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(got)) == 1
    with store.database.read() as db:
        assert db.execute(text("SELECT count(*) FROM jobs")).scalar() == 4


def test_jobs_that_are_claimed_ahead_are_not_counted_as_running(store: Store) -> None:
    store.add_batch("b", [JobSpec(code="x")] * 30, None, None)
    store.report(Member(name="two", slots=2))
    store.report(Member(name="older"))
    store.claim(10, "two", 60)
    progress = store.progress("b")
    assert (progress.running, progress.queued, progress.total) == (2, 28, 30)
    store.claim(3, "older", 60)  # its version does not report its slots
    store.claim(4, "silent", 60)
    assert store.progress("b").running == 2 + 3 + 4
    store.report(Member(name="silent", slots=8))
    assert store.progress("b").running == 2 + 3 + 4


def test_a_job_is_leased_to_one_worker_only(store: Store) -> None:
    store.add_batch("b", JOBS, None, None)
    first = store.claim(2, "w1", 60).leases
    assert [(lease.job_id, lease.attempt, lease.spec) for lease in first] == [
        ("b-000000", 1, JOBS[0]),
        ("b-000001", 1, JOBS[1]),
    ]
    assert [lease.job_id for lease in store.claim(9, "w2", 60).leases] == ["b-000002", "b-000003"]
    assert store.claim(9, "w3", 60).leases == []


def test_a_job_whose_lease_expired_is_leased_again_as_another_attempt(store: Store) -> None:
    store.add_batch("b", JOBS, None, None)
    store.claim(1, "dead", -1)
    assert store.expire(3) == 1
    again = store.claim(1, "w", 60).leases
    assert [(lease.job_id, lease.attempt) for lease in again] == [("b-000000", 2)]


def test_a_job_ends_as_sandbox_error_after_its_last_lease_has_expired(store: Store) -> None:
    store.add_batch("b", JOBS[:1], None, None)
    for _ in range(3):
        store.claim(1, "dead", -1)
        assert store.expire(3) == 1
    (given_up,) = next(store.results(["b-000000"]), [])
    assert (given_up.verdict, given_up.attempt) == (Verdict.SANDBOX_ERROR, 3)
    assert store.claim(1, "w", 60).leases == []


def test_a_renewal_returns_the_lost_and_the_cancelled_jobs(store: Store) -> None:
    store.add_batch("b", JOBS[:3], None, None)
    store.claim(3, "w", 60)
    store.add_batch("c", JOBS[:2], None, None)
    store.claim(2, "w", 60)
    store.cancel(job_id="c-000000")
    held = {"b-000000": 1, "b-000001": 9, "b-000002": 1, "c-000000": 1, "c-000001": 1}
    assert store.renew(held, "other", 60) == (set(held), set())
    assert store.renew(held, "w", 60) == ({"b-000001"}, {"c-000000"})


def test_a_lease_is_prolonged_when_a_third_of_its_time_is_over(store: Store) -> None:
    store.add_batch("b", JOBS[:2], None, None)
    store.claim(1, "w", 60)
    store.claim(1, "w", 39)

    def until() -> list[float]:
        with store.database.read() as db:
            return list(db.scalars(text("SELECT lease_until FROM jobs ORDER BY id")))

    before = until()
    assert store.renew({"b-000000": 1, "b-000001": 1}, "other", 60).lost == {"b-000000", "b-000001"}
    assert until() == before
    assert store.renew({"b-000000": 1, "b-000001": 1}, "w", 60) == (set(), set())
    after = until()
    assert after[0] == before[0]
    assert after[1] >= before[1] + 20


def test_a_lease_is_renewed_after_the_clock_of_the_database_was_set_back(store: Store) -> None:
    store.add_batch("b", JOBS[:2], None, None)
    store.claim(2, "w", 60)
    with store.database.write() as db:
        db.execute(text("UPDATE jobs SET lease_until = lease_until + 3600 WHERE id = 'b-000000'"))
    assert store.renew({"b-000000": 1, "b-000001": 1}, "w", 60) == (set(), set())
    with store.database.read() as db:
        until = list(db.scalars(text("SELECT lease_until FROM jobs ORDER BY id")))
    assert abs(until[0] - until[1]) < 60


def test_a_worker_learns_in_one_query_whether_there_is_anything_to_do(store: Store) -> None:
    assert store.pending() == (False, False, False)
    store.add_batch("b", JOBS[:1], None, None)
    assert store.pending() == (True, False, False)
    assert Store(store.database, "another fleet").pending() == (False, False, False)
    store.claim(1, "w", 60)
    assert store.pending() == (False, False, False)
    store.renew({"b-000000": 1}, "w", 60)
    with store.database.write() as db:
        db.execute(text("UPDATE jobs SET lease_until = 0"))
    assert store.pending() == (False, True, False)
    with store.database.write() as db:
        db.execute(text("UPDATE jobs SET state = 'held'"))
        db.execute(text("UPDATE batches SET todo = 'queueing', created_at = 0"))
    assert store.pending() == (False, False, True)


def test_a_set_of_ids_can_be_empty_or_large(store: Store) -> None:
    store.add_batch("b", [JOBS[0]] * 3000, None, None)
    leases = store.claim(2999, "w", 60, without=[f"image{number}:1" for number in range(900)]).leases
    assert len(store.record([result(lease) for lease in leases], "w")) == 2999
    assert sum(map(len, store.results([lease.job_id for lease in leases]))) == 2999
    assert store.renew({}, "w", 60) == (set(), set())
    assert store.counts([]) == {}
    assert list(store.results([])) == []


def test_a_job_that_was_finished_meanwhile_is_not_lost(store: Store) -> None:
    store.add_batch("b", JOBS, None, None)
    (lease,) = store.claim(1, "w", 60).leases
    store.record([result(lease)])
    assert store.renew({"b-000000": 1}, "w", 60) == (set(), set())


def test_a_released_job_is_queued_again_and_keeps_its_failures(store: Store) -> None:
    store.add_batch("b", JOBS, None, None)
    untried, tried = store.claim(2, "w", 60).leases
    store.put_back([untried], "w")
    store.release(tried, "w", "the container\nis gone")
    first, second = store.claim(2, "w", 60).leases
    assert (first.attempt, first.failures) == (1, ())
    assert (second.attempt, second.failures) == (2, ("the container is gone",))
    store.release(second, "w", "again")
    assert store.claim(1, "w", 60).leases[0].failures == ("the container is gone", "again")


def test_a_worker_that_failed_with_a_job_leaves_it_to_other_workers_for_a_while(store: Store) -> None:
    store.add_batch("b", JOBS[:1], None, None)
    (lease,) = store.claim(1, "w1", 60).leases
    store.release(lease, "w1", "the container is gone", shun=60)
    assert not store.claim(1, "w1", 60).leases
    (again,) = store.claim(1, "w2", 60).leases
    store.release(again, "w2", "here too", shun=0.01)
    time.sleep(0.05)
    assert store.claim(1, "w2", 60).leases  # no other worker has claimed it meanwhile


def test_dead_letters_are_kept(store: Store) -> None:
    store.bury("w", "of another version", "{}")
    assert store.letters() == 1


def test_a_stale_release_changes_nothing(store: Store) -> None:
    store.add_batch("b", JOBS[:1], None, None)
    (old,) = store.claim(1, "w1", -1).leases
    store.expire(3)
    store.claim(1, "w2", 60)
    store.release(old, "w1", "late")
    assert store.state("b-000000") is State.RUNNING


def test_a_new_batch_shares_the_slots_with_an_older_one(store: Store) -> None:
    store.add_batch("a", [JobSpec(code="x")] * 1000, None, None)
    store.claim(100, "w", 60)
    store.add_batch("b", [JobSpec(code="x")] * 10, None, None)
    next_ones = [lease.batch_id for lease in store.claim(20, "w", 60).leases]
    assert next_ones.count("b") == 10


def test_a_higher_priority_goes_first_and_does_not_starve_a_lower_one(store: Store) -> None:
    store.add_batch("low", [JobSpec(code="x", priority=Priority.LOW)], None, None)
    store.add_batch("normal", [JobSpec(code="x")] * 5, None, None)
    store.add_batch("high", [JobSpec(code="x", priority=Priority.HIGH)] * 5, None, None)
    assert [lease.batch_id for lease in store.claim(11, "w", 60).leases] == ["high"] * 5 + ["normal"] * 5 + ["low"]
    store.add_batch("low2", [JobSpec(code="x", priority=Priority.LOW)], None, None)
    for served in range(3000):
        store.add_batch(f"h{served}", [JobSpec(code="x", priority=Priority.HIGH)], None, None)
        if store.claim(1, "w", 60).leases[0].batch_id == "low2":
            break
    assert 10 < served < 200


def test_the_first_result_wins(store: Store) -> None:
    store.add_batch("b", JOBS, None, None)
    (lease,) = store.claim(1, "w", 60).leases
    assert store.record([result(lease)]) == {"b-000000"}
    assert store.record([result(lease, Verdict.RUNTIME_ERROR)]) == set()
    (stored,) = next(store.results(["b-000000"]), [])
    assert stored.verdict is Verdict.PASSED
    assert store.progress("b").model_dump(include={"queued", "finished", "total"}) == {
        "queued": 3,
        "finished": 1,
        "total": 4,
    }
    assert "b-000000" not in [again.job_id for again in store.claim(9, "w", 60).leases]


def test_the_first_result_wins_within_one_commit_too(store: Store) -> None:
    store.add_batch("b", JOBS, None, None)
    (lease,) = store.claim(1, "w", 60).leases
    assert store.record([result(lease), result(lease, Verdict.CANCELLED)]) == {"b-000000"}
    (stored,) = next(store.results(["b-000000"]))
    assert (stored.verdict, store.state("b-000000")) == (Verdict.PASSED, State.FINISHED)


def test_a_result_is_read_exactly_as_it_was_stored(store: Store) -> None:
    spec = JobSpec(code="x", task_id=7, sample_id="s", labels={"model": "m", "n": 1}, cases=[Case("", "")])
    store.add_batch("b", [spec], None, None)
    (lease,) = store.claim(1, "w", 60).leases
    metrics = Metrics(wall_seconds=1.5, cpu_seconds=0.5, peak_memory_bytes=5 << 30, oom_killed=True, processes_peak=3)
    case = CaseResult(index=0, verdict=Verdict.WRONG_ANSWER, stdout="ü", detail="d", metrics=metrics)
    given = result(
        lease, Verdict.WRONG_ANSWER, task_id=7, sample_id="s", labels={"model": "m", "n": 1}, cases=(case,),
        metrics=metrics,
        stdout="ü", stderr="e", worker="w", sandbox_id="s", image_digest="sha256:0", signal=9, detail="d",
        stdout_truncated=True,
    )  # fmt: skip
    store.record([given])
    assert next(store.results(["b-000000"]), []) == [given]
    assert list(store.batch_results("b")) == [given]
    assert Result.model_validate_json(given.model_dump_json()) == given


def test_cancelling_a_batch_ends_its_waiting_jobs_and_lets_the_running_one_finish(store: Store) -> None:
    store.add_batch("b", JOBS, None, None)
    (running,) = store.claim(1, "w", 60).leases
    assert store.cancel(batch_id="b") == 3
    progress = store.progress("b")
    assert (progress.cancelled, progress.running, progress.verdicts) == (3, 1, {Verdict.CANCELLED: 3})
    assert store.claim(9, "w", 60).leases == []
    store.record([result(running)])
    assert store.progress("b").complete
    assert store.cancel(batch_id="b") == 0


def test_a_cancelled_job_that_is_put_back_never_runs(store: Store) -> None:
    store.add_batch("b", JOBS[:1], None, None)
    store.claim(1, "dead", -1)
    assert store.cancel(job_id="b-000000") == 0
    assert store.expire(3) == 1
    assert store.progress("b").verdicts == {Verdict.CANCELLED: 1}


def test_the_migrations_create_the_tables_of_the_models(store: Store) -> None:
    with store.database.read() as db:
        difference = compare_metadata(MigrationContext.configure(db), SQLModel.metadata)
    assert [change for change in difference if change[0] != "modify_type"] == []


def test_a_database_with_a_newer_schema_is_rejected(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    database = Database(url)
    with database.write() as db:
        db.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    with pytest.raises(SchemaMismatch, match="9999"):
        Database(url)


def test_a_migration_may_take_longer_than_the_statements_of_workers(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres.execute("CREATE DATABASE patient")
    found: list[str | None] = []

    def upgrade(config: Any, _revision: str) -> None:
        connection = config.attributes["connection"]
        found.extend(connection.scalar(text(f"SHOW {name}")) for name in ("statement_timeout", "lock_timeout"))

    monkeypatch.setattr("evalpool.schemas.database.command.upgrade", upgrade)
    Database(postgres.url("patient").replace("postgresql://", "postgresql+psycopg://", 1)).close()
    assert found == ["0", "0"]


def test_single_jobs_that_are_stored_together_are_batches_of_their_own(store: Store) -> None:
    singles = [Single(f"b{number}", JobSpec(code=str(number), task_id=number), "i") for number in range(5)]
    store.add_singles(singles)
    assert [store.progress(single.batch_id).queued for single in singles] == [1] * 5
    leases = store.claim(9, "w", 60).leases
    assert [(lease.batch_id, lease.spec) for lease in leases] == [(each.batch_id, each.spec) for each in singles]
    assert {lease.image for lease in leases} == {"i"}


def test_single_jobs_can_be_stored_again_after_a_commit_whose_acknowledgement_was_lost(store: Store) -> None:
    singles = [Single(f"b{number}", JobSpec(code="x"), "i") for number in range(3)]
    store.add_singles(singles[:2])
    (lease,) = store.claim(1, "w", 60).leases
    store.add_singles(singles)
    assert store.progress(lease.batch_id).running == 1
    assert len(store.claim(9, "w", 60).leases) == 2


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
def test_the_length_of_a_statement_is_bounded_however_long_the_rows_are(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL refuses messages of 1 GiB."""
    monkeypatch.setattr(statements, "LONGEST", 3000)
    longest = 0

    def measure(*args: Any) -> None:
        nonlocal longest
        longest = max(longest, 0, *(len(value) for value in args[3].values() if isinstance(value, str)))

    event.listen(store.database.engine, "before_cursor_execute", measure)
    store.add_batch("b", [JobSpec(code="x" * 1000)] * 10, None, None)
    leases = store.claim(10, "w", 60).leases
    texts = [str(number) * 1000 for number in range(9)] + ["9" * 3500]
    cases = (CaseResult(index=0, verdict=Verdict.PASSED, stdout="y" * 1000),)
    results = [result(lease, stdout=text, cases=cases) for lease, text in zip(leases, texts, strict=True)]
    assert store.record(results) == {lease.job_id for lease in leases}
    assert longest < 6000  # the longest row by itself
    assert [each.stdout for each in store.batch_results("b")] == texts
    assert store.record(results) == set()


def test_threads_and_processes_that_write_wait_for_each_other(store: Store) -> None:
    """The other process is a second connection, which holds SQLite's write lock for a moment."""
    other = Database(str(store.database.url))
    with other.write() as db, ThreadPoolExecutor(4) as threads:
        written = [threads.submit(store.add_batch, f"b{n}", [JobSpec(code="x")], None, None) for n in range(4)]
        db.exec_driver_sql("INSERT INTO batches (id, total, created_at) VALUES ('other', 0, 0)")
        assert not any(each.done() for each in written)
        db.commit()
        assert {each.result(timeout=PATIENCE) for each in written} == {"b0", "b1", "b2", "b3"}
    other.close()
