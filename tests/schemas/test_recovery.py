"""Every job gets exactly one result: last attempts, identical jobs, large batches, jobs of other versions."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from evalpool.schemas import JobSpec, Priority, State, Verdict, entries, registry
from evalpool.schemas import store as module
from evalpool.schemas.audit import audit
from evalpool.schemas.store import Store
from tests.schemas.test_store import result

SAME = [JobSpec(code="x", task_id="t", sample_id=n) for n in range(4)]
DIGESTS = [spec.digest("image") for spec in SAME]


def at_once(*calls: Callable[[], object]) -> list[BaseException]:
    """Run all of them in threads, and return what they raised."""
    raised: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def ask(store: Store, query: str) -> list[Any]:
    with store.database.read() as db:
        return list(db.execute(text(query)).all())


def change(store: Store, command: str) -> None:
    with store.database.write() as db:
        db.execute(text(command))


def verdicts(store: Store, batch_id: str = "b") -> dict[Verdict, int]:
    return store.progress(batch_id).verdicts


# -- leases that run out ---------------------------------------------------------------------------


def test_jobs_whose_last_lease_expires_under_four_reconcilers_all_get_a_result(store: Store) -> None:
    store.add_batch("b", [JobSpec(code="x")] * 2000, None, None)
    chance = random.Random(7)
    held = {lease.job_id: 1 for _ in range(200) for lease in store.claim(10, "w", chance.uniform(0, 0.6)).leases}
    done = threading.Event()

    def reconcile() -> None:
        while not done.is_set():
            store.expire(1)

    def renew() -> None:
        for _ in range(20):
            store.renew(dict(chance.sample(sorted(held.items()), 200)), "w", 0.05)
        while not store.progress("b").complete:
            pass
        done.set()

    raised = at_once(reconcile, reconcile, reconcile, reconcile, renew)
    assert raised == []
    assert verdicts(store) == {Verdict.SANDBOX_ERROR: 2000}
    assert audit(store, repair=False) == []


def test_a_job_whose_last_lease_expires_is_never_put_back(store: Store) -> None:
    store.add_batch("b", SAME, None, None)
    store.claim(4, "w", -1)
    store.expire(1)
    assert store.claim(9, "w", 60).leases == []
    assert verdicts(store) == {Verdict.SANDBOX_ERROR: 4}


def test_a_job_that_has_a_result_but_is_still_open_does_not_block_others(store: Store) -> None:
    """An older version could leave such rows."""
    store.add_batch("b", SAME, None, None)
    leases = store.claim(4, "w", -1).leases
    store.record([result(leases[0])])
    change(store, "UPDATE jobs SET state = 'running', lease_until = 0 WHERE id = 'b-000000'")
    store.expire(1)
    assert verdicts(store) == {Verdict.PASSED: 1, Verdict.SANDBOX_ERROR: 3}
    assert store.state("b-000000") is State.FINISHED


def test_a_stale_release_does_not_touch_the_lease_of_another_worker(store: Store) -> None:
    store.add_batch("b", SAME[:1], None, None)
    (old,) = store.claim(1, "w1", 60).leases
    store.put_back([old], "w1")
    (new,) = store.claim(1, "w2", 60).leases
    assert new.attempt == old.attempt
    store.release(old, "w1", "late")
    store.put_back([old], "w1")
    assert store.state(new.job_id) is State.RUNNING


# -- the audit -------------------------------------------------------------------------------------


def test_the_audit_finds_and_repairs_what_older_versions_left(store: Store) -> None:
    store.add_batch("b", SAME, None, None)
    first, second, third, fourth = store.claim(4, "w", 60).leases
    store.record([result(second), result(third), result(fourth)])
    change(store, "UPDATE jobs SET state = 'finished' WHERE id = 'b-000000'")
    change(store, "UPDATE jobs SET state = 'running' WHERE id = 'b-000001'")
    change(store, "UPDATE jobs SET state = 'cancelled' WHERE id = 'b-000002'")
    change(store, "UPDATE tallies SET verdict = 'wrong_answer'")
    found = {finding.what: list(finding.ids) for finding in audit(store, repair=False)}
    assert list(found.values()) == [["b-000000"], ["b-000001", "b-000002"], ["b"]]
    assert len(audit(store, repair=True)) == 3
    assert audit(store, repair=False) == []
    assert [store.state(f"b-{n:06}") for n in range(4)] == [State.QUEUED, *[State.FINISHED] * 3]
    assert verdicts(store) == {Verdict.PASSED: 3}
    assert first.job_id == store.claim(1, "w", 60).leases[0].job_id


def test_the_audit_finds_twins_whose_leader_has_ended_or_is_missing(store: Store) -> None:
    store.add_batch("b", SAME, None, None, DIGESTS)
    store.add_batch("c", SAME, None, None, DIGESTS)
    change(store, "UPDATE jobs SET twin_of = 'gone' WHERE id = 'b-000003'")
    (_, lease) = store.claim(9, "w", 60).leases
    change(store, "UPDATE jobs SET state = 'running' WHERE id = 'c-000003'")
    store.record([result(lease)])
    change(store, "UPDATE jobs SET state = 'twin' WHERE id = 'c-000003'")
    (found,) = audit(store, repair=True)
    assert found.ids == ["b-000003", "c-000003"]
    assert verdicts(store, "c") == {Verdict.PASSED: 4}
    assert [lease.job_id for lease in store.claim(9, "w", 60).leases] == ["b-000003"]


# -- identical jobs --------------------------------------------------------------------------------


def finish_rest(store: Store) -> None:
    while leases := store.claim(9, "w", 60).leases:
        store.record([result(lease) for lease in leases])


def test_a_twin_of_a_cancelled_leader_runs(store: Store) -> None:
    store.add_batch("b", SAME, None, None, DIGESTS)
    store.cancel(job_id="b-000000")
    (heir,) = store.claim(9, "w", 60).leases
    assert heir.job_id == "b-000001"  # one of them runs, and the others wait for that one
    store.record([result(heir)])
    assert verdicts(store) == {Verdict.CANCELLED: 1, Verdict.PASSED: 3}


def test_a_twin_runs_if_its_leader_has_used_up_its_attempts(store: Store) -> None:
    store.add_batch("b", SAME, None, None, DIGESTS)
    store.claim(1, "dead", -1)
    store.expire(1)
    finish_rest(store)
    assert verdicts(store) == {Verdict.SANDBOX_ERROR: 1, Verdict.PASSED: 3}


@pytest.mark.parametrize("how", ["release", "put_back", "expire"])
def test_a_twin_runs_if_its_cancelled_leader_is_put_back_or_expires(store: Store, how: str) -> None:
    store.add_batch("b", SAME, None, None, DIGESTS)
    (lease,) = store.claim(1, "w", -1 if how == "expire" else 60).leases
    store.cancel(job_id=lease.job_id)
    if how == "release":
        store.release(lease, "w", "failed")
    elif how == "put_back":
        store.put_back([lease], "w")
    else:
        store.expire(3)
    finish_rest(store)
    assert verdicts(store) == {Verdict.CANCELLED: 1, Verdict.PASSED: 3}


def test_a_twin_of_a_twin_gets_the_result_too(store: Store) -> None:
    """Two processes submit one stream, and the second does not know the leader of the first."""
    store.open_batch("b", 4, None, "key", {})
    store.add_jobs("b", 0, SAME[:1], 0.0, DIGESTS[:1], {})
    store.add_jobs("b", 1, SAME[1:2], 0.0, DIGESTS[1:2], {1: "b-000000"})
    store.add_jobs("b", 2, SAME[2:], 0.0, DIGESTS[2:], {2: "b-000001", 3: "b-000002"})
    (lease,) = store.claim(9, "w", 60).leases
    assert len(store.record([result(lease)])) == 4
    assert verdicts(store) == {Verdict.PASSED: 4}


def test_the_twins_in_a_cancelled_batch_are_cancelled_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 2)
    store.add_batch("b", SAME, None, None, DIGESTS)
    store.cancel(batch_id="b")
    assert verdicts(store) == {Verdict.CANCELLED: 4}
    assert store.claim(9, "w", 60).leases == []


# -- jobs of other versions ------------------------------------------------------------------------


def test_a_job_that_this_version_cannot_read_is_not_tried_and_does_not_affect_others(store: Store) -> None:
    store.add_batch("b", SAME, None, None)
    change(store, """UPDATE jobs SET spec = '{"code": "x", "field_of_the_future": 1}' WHERE id = 'b-000001'""")
    claim = store.claim(9, "w1", 60, version="1")
    assert [lease.job_id for lease in claim.leases] == ["b-000000", "b-000002", "b-000003"]
    assert list(claim.unreadable) == ["b-000001"]
    assert store.state("b-000001") is State.QUEUED
    assert ask(store, "SELECT attempt FROM jobs WHERE id = 'b-000001'") == [(0,)]
    assert store.claim(9, "w2", 60, version="1").count == 0  # another worker of this version does not try again
    assert list(store.claim(9, "w3", 60, version="2").unreadable) == ["b-000001"]
    assert store.waiting("b") == [("", None, True, 1)]


def test_jobs_whose_image_a_worker_lacks_are_left_to_others(store: Store) -> None:
    store.add_batch("b", SAME, None, None, images=["a:1 sha256:1", "b:1", "a:1 sha256:2", "a:1 sha256:1"])
    claimed = store.claim(9, "w", 60, without={"a:1 sha256:1", "b:1"}).leases
    assert [(lease.job_id, lease.image) for lease in claimed] == [("b-000002", "a:1 sha256:2")]
    assert sorted(store.waiting("b")) == [("", "a:1 sha256:1", False, 2), ("", "b:1", False, 1)]  # type: ignore[type-var]


def test_an_image_is_pinned_once_for_all_jobs_of_a_batch(store: Store) -> None:
    store.add_batch("b", SAME, None, None)
    assert store.pin("b", "a:1", "sha256:1") == "sha256:1"
    assert store.pin("b", "a:1", "sha256:2") == "sha256:1"
    assert store.pin("b", "b:1", "sha256:2") == "sha256:2"


# -- large batches ---------------------------------------------------------------------------------


def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE", 3)
    monkeypatch.setattr(module, "PART", 2)


def test_a_large_batch_is_stored_in_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch)
    store.add_batch("b", SAME * 2, None, None)
    assert [lease.job_id for lease in store.claim(9, "w", 60).leases] == [f"b-{n:06}" for n in range(8)]


def test_a_large_batch_whose_submission_was_interrupted_does_not_run_until_it_is_submitted_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch)
    add, calls = entries.add, []

    def breaking(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ConnectionError("cut off")
        add(*args)

    monkeypatch.setattr(entries, "add", breaking)
    with pytest.raises(ConnectionError):
        store.add_batch("b", SAME * 2, None, "key")
    assert store.claim(9, "w", 60).leases == []
    assert store.state("b-000001") is State.QUEUED
    assert store.add_batch("c", SAME * 2, None, "key") == "b"
    store.fill("b", SAME * 2)
    assert len(store.claim(9, "w", 60).leases) == 8


def test_a_second_submission_cannot_add_other_jobs_to_a_large_batch(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch)
    part, others = module.rows.job_row, [JobSpec(code="y")] * 8
    refused: list[bool] = []

    def meanwhile(batch_id: str, seq: int, *args: Any) -> dict[str, Any]:
        for jobs in (others, others[:5], others[:2]) if seq == 4 else ():  # between two transactions
            assert store.add_batch("c", jobs, None, "key") == "b"
            refused.append(not store.fill("b", jobs))
        return part(batch_id, seq, *args)

    monkeypatch.setattr(module.rows, "job_row", meanwhile)
    assert store.add_batch("b", SAME * 2, None, "key") == "b"
    assert refused == [True] * 3
    assert {lease.spec.code for lease in store.claim(20, "w", 60).leases} == {"x"}
    assert ask(store, "SELECT count(*) FROM jobs") == [(8,)]


def test_a_large_batch_that_is_resumed_does_not_wait_for_a_leader_that_was_cancelled_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch)
    add, calls = entries.add, []

    def breaking(*args: Any) -> set[str]:
        calls.append(1)
        if len(calls) == 2:
            raise ConnectionError("cut off")
        return add(*args)

    monkeypatch.setattr(entries, "add", breaking)
    with pytest.raises(ConnectionError):
        store.add_batch("b", SAME, None, "key", DIGESTS)
    store.cancel(job_id="b-000000")
    store.add_batch("c", SAME, None, "key", DIGESTS)
    store.fill("b", SAME, DIGESTS)
    finish_rest(store)
    assert verdicts(store) == {Verdict.CANCELLED: 1, Verdict.PASSED: 3}


def test_a_worker_finishes_the_queueing_or_cancelling_that_another_process_began(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch)
    with monkeypatch.context() as cut_off:
        cut_off.setattr(Store, "finish", lambda *_: 0)
        store.add_batch("b", SAME, None, None)
        store.add_batch("c", SAME[:2], None, None)
        store.cancel(batch_id="c")
    assert [lease.job_id for lease in store.claim(9, "w", 60).leases] == ["c-000000", "c-000001"]
    assert store.abandoned() == []
    monkeypatch.setattr(module, "ABANDONED_SECONDS", -1)
    assert sorted(store.abandoned()) == ["b", "c"]
    for batch_id in store.abandoned():
        store.finish(batch_id)
    assert store.abandoned() == []
    assert len(store.claim(9, "w", 60).leases) == 4
    held = store.renew({"c-000000": 1, "c-000001": 1}, "w", 60)
    assert held == (set(), {"c-000000", "c-000001"})


def test_a_batch_that_is_cancelled_while_it_is_streamed_stays_cancelled(store: Store) -> None:
    store.open_batch("b", 4, None, None, {})
    store.add_jobs("b", 0, SAME[:2], 0.0)
    store.cancel(batch_id="b")
    store.add_jobs("b", 2, SAME[2:], 0.0, DIGESTS[2:], {3: "b-000002"})
    assert store.claim(9, "w", 60).leases == []
    assert verdicts(store) == {Verdict.CANCELLED: 4}
    assert store.progress("b").complete


# -- turns -----------------------------------------------------------------------------------------


def test_a_resumed_stream_gets_current_turns_whatever_its_priority(store: Store) -> None:
    low = [JobSpec(code="x", priority=Priority.LOW)] * 20
    _, _, turn = store.open_batch("low", 20, None, "key", {})
    store.add_jobs("low", 0, low[:10], turn)
    assert len(store.claim(99, "w", 60).leases) == 10
    stored, there, turn = store.open_batch("low", 20, None, "key", {})
    store.add_jobs(stored, there, low[there:], turn, first=there)
    store.add_batch("n", [JobSpec(code="x")] * 200, None, None)
    first = [lease.batch_id for lease in store.claim(100, "w", 60).leases]
    assert 3 <= first.count("low") <= 7  # one in sixteen, and a head start of 32 turns for the others


def test_single_jobs_share_the_slots_with_batches(store: Store) -> None:
    for n in range(300):
        store.add_batch(f"s{n:04}", [JobSpec(code="x")], None, None)
    store.add_batch("b", [JobSpec(code="x")] * 50, None, None)
    first = [lease.batch_id for lease in store.claim(60, "w", 60).leases]
    assert 25 <= first.count("b") <= 35


def test_cancelled_single_jobs_do_not_delay_later_ones(store: Store) -> None:
    for n in range(300):
        store.add_batch(f"s{n:04}", [JobSpec(code="x")], None, None)
    for n in range(300):
        store.cancel(batch_id=f"s{n:04}")
    store.add_batch("b", [JobSpec(code="x")] * 50, None, None)
    store.add_batch("late", [JobSpec(code="x")], None, None)
    assert "late" in [lease.batch_id for lease in store.claim(5, "w", 60).leases]


# -- bounded --------------------------------------------------------------------------------------


def test_only_the_latest_unreadable_messages_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LETTERS_KEPT", 5)
    for n in range(12):
        store.bury("w", f"{n}", "{}")
    assert store.letters() == 5
    assert ask(store, "SELECT min(id) FROM letters") == [(8,)]
