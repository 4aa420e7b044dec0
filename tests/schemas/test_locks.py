"""Two transactions that lock the same jobs: one waits for the other, and they never deadlock."""

import threading
from collections.abc import Callable

import pytest
from sqlalchemy import text

from evalpool.schemas import JobSpec, Verdict, endings
from evalpool.schemas import store as module
from evalpool.schemas.audit import audit
from evalpool.schemas.store import Store
from tests.conftest import eventually
from tests.schemas.test_recovery import ask, at_once
from tests.schemas.test_store import result

# SQLite has one writer at a time
pytestmark = pytest.mark.parametrize("store", ["postgresql"], indirect=True)

WAITING = """
    SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()
"""
Meet = Callable[[Callable[[], object], Callable[[], object]], None]


@pytest.fixture
def meet(store: Store, monkeypatch: pytest.MonkeyPatch) -> Meet:
    """Stop the first transaction before it shares results with twins, start the second, and continue the first when the
    second waits for a lock."""

    def run(first: Callable[[], object], second: Callable[[], object]) -> None:
        share, arrived = endings.share, threading.Event()

        def slow(*args: object) -> set[str]:
            if not arrived.is_set():
                arrived.set()
                eventually(lambda: ask(store, WAITING) != [(0,)])
            return share(*args)  # type: ignore[arg-type]

        def follow() -> object:
            assert arrived.wait(60)
            return second()

        monkeypatch.setattr(endings, "share", slow)
        assert at_once(first, follow) == []
        assert audit(store, repair=False) == []

    return run


def submit(store: Store, *codes: str) -> None:
    specs = [JobSpec(code=code) for code in codes]
    store.add_batch("b", specs, None, None, [spec.digest("image") for spec in specs])


def test_a_twin_that_is_being_cancelled_does_not_take_the_place_of_its_leader(store: Store, meet: Meet) -> None:
    submit(store, "x", "x", "x")
    (lease,) = store.claim(9, "w", 60).leases
    failed = [result(lease, Verdict.SANDBOX_ERROR)]
    meet(lambda: store.cancel(job_id="b-000001"), lambda: store.record(failed, "w"))
    assert store.progress("b").verdicts == {Verdict.CANCELLED: 1, Verdict.SANDBOX_ERROR: 1}
    assert [lease.job_id for lease in store.claim(9, "w", 60).leases] == ["b-000002"]


def test_a_leader_and_its_twin_can_be_cancelled_concurrently(store: Store, meet: Meet) -> None:
    submit(store, "x", "x", "x")
    meet(lambda: store.cancel(job_id="b-000000"), lambda: store.cancel(job_id="b-000001"))
    assert store.progress("b").verdicts == {Verdict.CANCELLED: 2}
    assert [lease.job_id for lease in store.claim(9, "w", 60).leases] == ["b-000002"]


def test_results_can_be_recorded_while_their_twins_are_cancelled(
    store: Store, meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 2)
    submit(store, "x", "y", "x", "z")
    leases = store.claim(9, "w", 60).leases
    recorded = [result(lease) for lease in leases if lease.job_id != "b-000001"]
    meet(lambda: store.record(recorded, "w"), lambda: store.cancel(batch_id="b"))
    assert store.progress("b").verdicts == {Verdict.PASSED: 3}


def test_results_can_be_recorded_while_a_second_process_adds_twins_of_twins(store: Store, meet: Meet) -> None:
    same, other = JobSpec(code="x"), JobSpec(code="y")
    digests = [same.digest("image"), same.digest("image"), other.digest("image")]
    store.open_batch("b", 5, None, None, {})
    store.add_jobs("b", 0, [same, same, other], 0.0, digests, {1: "b-000000"})
    recorded = [result(lease) for lease in store.claim(9, "w", 60).leases]
    late = {3: "b-000001", 4: "b-000002"}
    meet(lambda: store.record(recorded, "w"), lambda: store.add_jobs("b", 3, [same, other], 0.0, digests[1:], late))
    assert store.progress("b").verdicts == {Verdict.PASSED: 5}


def test_a_claim_reports_that_it_passed_over_a_locked_job(store: Store) -> None:
    submit(store, "x", "y")
    with store.database.write() as db:
        db.execute(text("SELECT id FROM jobs WHERE id = 'b-000000' FOR SHARE"))
        claim = store.claim(9, "w", 60)
        assert [lease.job_id for lease in claim.leases] == ["b-000001"]
        assert claim.passed_over
    claim = store.claim(9, "w", 60)
    assert [lease.job_id for lease in claim.leases] == ["b-000000"]
    assert not claim.passed_over
