"""The jobs of one fleet are invisible to the workers of another, until it adopts them."""

from typing import Any

from sqlalchemy import event, select
from sqlmodel import SQLModel

from evalpool.schemas import JobSpec, Verdict
from evalpool.schemas.fleet import Member
from evalpool.schemas.store import Store
from tests.schemas.test_store import result

_turns = SQLModel.metadata.tables["turns"]


def private(store: Store, name: str = "run-1") -> Store:
    return Store(store.database, name)


def specs(count: int) -> list[JobSpec]:
    return [JobSpec(code=f"{n}") for n in range(count)]


def claimed(store: Store) -> list[str]:
    return [lease.job_id for lease in store.claim(99, "w", 60).leases]


def test_a_claim_finds_only_the_jobs_of_its_own_fleet(store: Store) -> None:
    run, other = private(store), private(store, "run-2")
    store.add_batch("public", specs(2), None, None)
    run.open_batch("mine", 2, None, None, {})
    run.add_jobs("mine", 0, specs(2), 0.0)
    other.add_batch("theirs", specs(1), None, None)
    assert claimed(run) == ["mine-000000", "mine-000001"]
    assert claimed(run) == []
    assert claimed(store) == ["public-000000", "public-000001"]
    assert claimed(other) == ["theirs-000000"]


def test_a_large_batch_belongs_to_its_fleet_too(store: Store, monkeypatch: Any) -> None:
    monkeypatch.setattr("evalpool.schemas.store.WHOLE", 1)
    private(store).add_batch("mine", specs(3), None, None)
    assert claimed(store) == []
    assert len(claimed(private(store))) == 3


def test_a_job_stays_in_its_fleet_when_it_is_put_back_or_its_lease_expires(store: Store) -> None:
    run = private(store)
    run.add_batch("mine", specs(2), None, None)
    (lease, _) = run.claim(2, "w", -1).leases
    run.put_back([lease], "w")
    assert store.expire(3) == 1  # a worker of any fleet may notice
    assert claimed(store) == []
    assert len(claimed(run)) == 2


def test_a_fleet_adopts_what_is_left_of_a_batch(store: Store) -> None:
    run, again = private(store), private(store, "run-2")
    same = ["d1", "d2", "d2", "d3"]
    run.add_batch("mine", specs(4), None, None, same)
    store.add_batch("public", specs(1), None, None)
    done, lost = run.claim(2, "dead", -1).leases
    run.record([result(done)])
    assert again.adopt("mine") == 3  # the one that runs, its twin, and the one that waits
    assert again.adopt("mine") == 0
    again.expire(3)
    assert claimed(run) == []
    assert sorted(claimed(again)) == [lost.job_id, "mine-000003"]
    again.cancel(job_id=lost.job_id)
    again.expire(3)
    assert store.adopt("mine") == 3
    assert claimed(store) == ["public-000000"]


def test_a_private_run_takes_no_turns_from_others(store: Store) -> None:
    run = private(store)
    run.add_batch("mine", specs(50), None, None)
    claimed(run)
    with store.database.read() as db:
        assert db.scalar(select(_turns.c.value)) == 0


def test_only_workers_of_the_fleet_decide_about_its_images(store: Store) -> None:
    store.report(Member(name="a", images={"x:1": "sha256:1"}))
    store.report(Member(name="b", images={"x:1": "sha256:1"}))
    store.report(Member(name="c", images={"x:1": "sha256:2"}, fleet="run-1"))
    assert store.fleet(60).pin("x:1") == "x:1 sha256:1"
    assert private(store).fleet(60).pin("x:1") == "x:1 sha256:2"
    assert len(store.members(60)) == 3


def test_a_batch_that_is_given_up_is_cancelled_and_its_key_is_free(store: Store) -> None:
    store.open_batch("b", 2, None, "key", {})
    store.add_jobs("b", 0, specs(2), 0.0)
    assert store.give_up("b") == 2
    assert store.progress("b").verdicts == {Verdict.CANCELLED: 2}
    assert store.open_batch("c", 2, None, "key", {})[0] == "c"


def test_a_claim_goes_straight_to_its_fleet_by_the_index_of_the_queue(store: Store) -> None:
    private(store).add_batch("mine", specs(3), None, None)
    seen: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        seen.append((statement, parameters))

    event.listen(store.database.engine, "before_cursor_execute", note)
    store.claim(2, "w", 60)
    event.remove(store.database.engine, "before_cursor_execute", note)
    statement, parameters = next(each for each in seen if each[0].startswith("UPDATE jobs"))
    with store.database.write() as db:
        if db.dialect.name == "postgresql":
            db.exec_driver_sql("SET LOCAL enable_seqscan = off")  # a table of three rows is read faster without
            db.exec_driver_sql("SET LOCAL enable_bitmapscan = off")
            plan = "\n".join(db.exec_driver_sql(f"EXPLAIN {statement}", parameters).scalars())
            assert plan.count("Index Scan using ix_jobs_queue") == 3
            assert plan.count("Index Cond: (((fleet)::text = ''::text) AND ((priority)::text =") == 3
            assert "Sort Key: jobs.rank" not in plan
        else:
            steps = [row[3] for row in db.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            assert sum("USING INDEX ix_jobs_queue (fleet=? AND priority=?)" in step for step in steps) == 3
