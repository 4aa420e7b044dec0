"""Confidence intervals, and the notes that a reader needs to trust a score."""

import io

import pytest
from rich.console import Console

from evalpool.api import BatchHandle
from evalpool.api.reports import summary
from evalpool.schemas import JobSpec, Metrics, Verdict
from evalpool.schemas.report import MOST_PROBLEMS, interval
from evalpool.schemas.store import Store
from tests.api.conftest import record

PASSED, WRONG = Verdict.PASSED, Verdict.WRONG_ANSWER


def shown(store: Store, batch_id: str) -> str:
    text = io.StringIO()
    Console(file=text, width=120).print(summary.render(BatchHandle(batch_id).report()))
    return text.getvalue()


def test_the_interval_holds_the_mean_and_is_the_same_every_time() -> None:
    values = {1.0: 60, 0.0: 40}
    low, high = interval(values)
    assert low < 0.6 < high
    assert interval(values) == (low, high)
    assert 0.15 < high - low < 0.25  # 1.96 x 2 standard errors are 0.192
    assert interval({1.0: 5}) == (1.0, 1.0)


def test_the_interval_of_many_problems_is_the_normal_approximation() -> None:
    half = MOST_PROBLEMS // 2 + 1
    low, high = interval({0.0: half, 1.0: half})
    assert (low + high) / 2 == pytest.approx(0.5)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / (2 * half) ** 0.5)


def test_coverage_shows_how_many_problems_the_benchmark_has(store: Store) -> None:
    store.open_batch("b", 3, "toy", None, {"problems": 164, "format": "human-eval samples"})
    store.add_jobs("b", 0, [JobSpec(code="x", task_id=task) for task in ("a", "a", "b")], 0.0)
    record(store, [f"b-{n:06}" for n in range(3)])
    report = BatchHandle("b").report()
    assert (report.tasks, report.problems, report.samples_per_task) == (2, 164, (1, 2))
    assert report.made["format"] == "human-eval samples"
    assert "2/164 problems, 3 samples (1 to 2 of each)" in shown(store, "b")


def test_each_value_of_a_label_is_scored_separately_if_it_forms_a_group(store: Store) -> None:
    specs = [JobSpec(code="x", labels={"model": "a" if n < 30 else "b", "n": n, "same": 1}) for n in range(40)]
    store.add_batch("b", specs, None, None)
    record(store, [f"b-{n:06}" for n in range(30)])
    record(store, [f"b-{n:06}" for n in range(30, 40)], WRONG)
    by_label = BatchHandle("b").report().by_label
    assert by_label.keys() == {"model"}  # a label with another value for each job, or one value for all, says nothing
    assert (by_label["model"]["a"].rate, by_label["model"]["b"].rate) == (1.0, 0.0)


def test_samples_near_a_limit_are_counted_unless_they_exceeded_it(store: Store) -> None:
    store.add_batch("b", [JobSpec(code="x")] * 4, None, None)
    near, far = Metrics(limit_share=0.9), Metrics(limit_share=0.5)
    record(store, ["b-000000"], metrics=near)
    record(store, ["b-000001"], metrics=far)
    record(store, ["b-000002"], Verdict.TIME_LIMIT, metrics=near)
    record(store, ["b-000003"], metrics=Metrics(rerun=True))
    report = BatchHandle("b").report()
    assert (report.near_limit, report.rerun) == (1, 1)
    assert "1 verdict is within 20 % of a limit" in shown(store, "b")


def test_the_first_of_several_runs_counts_and_the_others_show_what_is_flaky(store: Store) -> None:
    store.open_batch("b", 6, None, None, {"repeat": 3})
    store.add_jobs("b", 0, [JobSpec(code=str(n % 2), task_id=f"t{n % 2}") for n in range(6)], 0.0)
    for seq, verdict in enumerate([PASSED, PASSED, PASSED, WRONG, PASSED, Verdict.SANDBOX_ERROR]):
        record(store, [f"b-{seq:06}"], verdict)
    report = BatchHandle("b").report()
    assert (report.total, report.finished, report.pass_at_k) == (2, 2, {1: 1.0})
    assert (report.repeats, report.flaky) == (3, ("b-000001",))
    assert "1 sample is flaky" in shown(store, "b")


def test_shared_results_are_counted_and_those_of_earlier_batches_among_them(store: Store) -> None:
    spec = JobSpec(code="x")
    store.add_batch("a", [spec], None, None, [spec.digest("i")])
    record(store, ["a-000000"])
    store.open_batch("b", 2, None, None, {})
    store.add_jobs("b", 0, [spec, spec], 0.0, [spec.digest("i")] * 2, {0: "a-000000", 1: "a-000000"})
    report = BatchHandle("b").report()
    assert (report.deduplicated, report.cached, report.pass_at_k) == (2, 2, {1: 1.0})
    assert "2 of them from earlier batches" in shown(store, "b")
