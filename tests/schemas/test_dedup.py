"""Deduplication: one of several identical jobs runs, and the others get its result, in any order of events."""

import pytest

from evalpool.schemas import JobSpec, Limits, Progress, State, Verdict, dedup
from evalpool.schemas.store import Store
from tests.schemas.test_store import result

SAME = [JobSpec(code="x", task_id="t", sample_id=n) for n in range(4)]


def digests(specs: list[JobSpec]) -> list[str]:
    return [spec.digest("image") for spec in specs]


def test_fields_that_are_only_copied_to_the_result_do_not_change_the_digest() -> None:
    one = JobSpec(code="x")
    assert one.digest("i") == JobSpec(code="x", task_id=1, sample_id=2, labels={"a": 1}, priority="high").digest("i")
    others = [
        JobSpec(code="y"),
        JobSpec(code="x", check="pass"),
        JobSpec(code="x", limits=Limits(cpu_seconds=1)),
        JobSpec(code="x", image="other"),
        JobSpec(code="x", stdin="1"),
        JobSpec(code="x", isolation="fresh"),
    ]
    assert len({one.digest("i"), one.digest("j"), *(spec.digest("i") for spec in others)}) == 8


def test_one_of_several_identical_jobs_runs_and_all_get_its_result(store: Store) -> None:
    store.add_batch("b", SAME, None, None, digests(SAME))
    (lease,) = store.claim(9, "w", 60).leases
    assert store.state("b-000001") is State.QUEUED
    assert store.progress("b") == Progress(total=4, queued=3, running=1)
    assert store.record([result(lease, cases=())]) == {f"b-{n:06}" for n in range(4)}
    found = list(store.batch_results("b"))
    assert [each.shared_with for each in found] == [None, *["b-000000"] * 3]
    assert [each.deduplicated for each in found] == [False, True, True, True]
    assert [each.sample_id for each in found] == [0, 1, 2, 3]
    assert store.progress("b").complete
    assert store.state("b-000003") is State.FINISHED


def test_a_shared_result_includes_its_cases(store: Store) -> None:
    from evalpool.schemas import CaseResult

    store.add_batch("b", SAME[:2], None, None, digests(SAME[:2]))
    (lease,) = store.claim(9, "w", 60).leases
    store.record([result(lease, cases=(CaseResult(index=0, verdict=Verdict.PASSED, stdout="7"),))])
    assert [each.cases[0].stdout for each in store.batch_results("b")] == ["7", "7"]


@pytest.mark.parametrize("verdict", [Verdict.SANDBOX_ERROR, Verdict.CANCELLED])
def test_a_verdict_that_is_not_scored_is_not_shared(store: Store, verdict: Verdict) -> None:
    store.add_batch("b", SAME[:2], None, None, digests(SAME[:2]))
    (lease,) = store.claim(9, "w", 60).leases
    assert store.record([result(lease, verdict)]) == {"b-000000"}
    (second,) = store.claim(9, "w", 60).leases
    assert second.job_id == "b-000001"
    store.record([result(second)])
    assert store.progress("b").verdicts == {verdict: 1, Verdict.PASSED: 1}


def test_twins_end_when_their_batch_is_cancelled(store: Store) -> None:
    store.add_batch("b", SAME, None, None, digests(SAME))
    assert store.cancel(batch_id="b") == 4
    assert store.progress("b").verdicts == {Verdict.CANCELLED: 4}


def test_a_stream_resumes_where_it_was_interrupted(store: Store) -> None:
    specs = [JobSpec(code=f"{n}") for n in range(6)]
    assert store.open_batch("b", 6, "name", "key", {"problems": 6})[:2] == ("b", 0)
    store.add_jobs("b", 0, specs[:4], 0.0)
    assert not store.progress("b").complete
    assert store.open_batch("c", 6, "name", "key", {})[:2] == ("b", 4)
    store.add_jobs("b", 2, specs[2:], 0.0)  # the interrupted process may still run: no job is stored twice
    assert [lease.spec.code for lease in store.claim(9, "w", 60).leases] == ["0", "1", "2", "3", "4", "5"]
    assert store.batch("b").about == {"problems": 6}


def test_a_twin_that_is_added_after_its_leader_ended_gets_the_result_at_once(store: Store) -> None:
    store.open_batch("b", 2, None, None, {})
    store.add_jobs("b", 0, SAME[:1], 0.0, digests(SAME[:1]), {})
    (lease,) = store.claim(9, "w", 60).leases
    store.record([result(lease)])
    assert store.add_jobs("b", 1, SAME[1:2], 0.0, digests(SAME[1:2]), {1: "b-000000"}) == {"b-000001"}
    assert store.progress("b").complete


def test_results_of_earlier_batches_are_known_by_their_digest(store: Store) -> None:
    store.add_batch("b", SAME[:2], None, None, digests(SAME[:2]))
    key = digests(SAME[:1])[0]
    assert store.known([key]) == {}
    (lease,) = store.claim(9, "w", 60).leases
    store.record([result(lease)])
    assert store.known([key, "other"]) == {key: "b-000000"}
    store.add_batch("c", [JobSpec(code="z")], None, None)
    assert store.known([JobSpec(code="z").digest("image")]) == {}


def test_a_leader_has_a_bounded_number_of_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "MOST", 3)
    monkeypatch.setattr(dedup, "APART", 15)
    seen: dict[str, str] = {}
    first = dedup.find_leaders("b", 0, ["same"] * 10, seen)
    assert first == {seq: f"b-{seq - seq % 4:06}" for seq in range(10) if seq % 4}
    assert dedup.find_leaders("b", 10, ["other"] * 2, seen) == {11: "b-000010"}
    assert dedup.find_leaders("b", 23, ["same"], seen) == {23: "b-000008"}
    assert dedup.find_leaders("b", 24, ["same"], seen) == {}
    assert dedup.find_leaders("b", 25, ["same"], seen) == {25: "b-000024"}


def test_a_leader_in_an_earlier_batch_can_have_any_number_of_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a leader has its result already."""
    monkeypatch.setattr(dedup, "MOST", 3)
    assert len(dedup.find_leaders("b", 0, ["same"] * 10, {"same": "a-000000"})) == 10
