"""Scores: which results count, and how a report looks."""

import io

import pytest
from rich.console import Console

from evalpool.api import BatchHandle
from evalpool.api.display import Display
from evalpool.api.reports import summary
from evalpool.schemas import JobSpec, Progress, Verdict
from evalpool.schemas.store import Store
from tests.api.conftest import record


def batch_of(store: Store, *samples: tuple[str | int | None, Verdict]) -> BatchHandle:
    """A batch with these tasks and verdicts."""
    specs = [JobSpec(code="x", task_id=task) for task, _ in samples]
    batch_id = store.add_batch("0" * 22, specs, "toy", None)
    for seq, (_, verdict) in enumerate(samples):
        record(store, [f"{batch_id}-{seq:06d}"], verdict, stderr="<script>alert(1)</script>")
    return BatchHandle(batch_id)


def test_pass_at_k_is_the_unbiased_estimate(store: Store) -> None:
    batch = batch_of(store, *[("t", Verdict.PASSED if n < 3 else Verdict.WRONG_ANSWER) for n in range(10)])
    scores = batch.report(k=(1, 5, 11)).pass_at_k
    assert scores == {1: pytest.approx(0.3), 5: pytest.approx(0.916667, abs=1e-6)}


def test_the_mean_is_over_problems_and_k_needs_enough_samples_of_each(store: Store) -> None:
    batch = batch_of(store, ("a", Verdict.PASSED), ("a", Verdict.PASSED), ("b", Verdict.TIME_LIMIT))
    report = batch.report()
    assert report.pass_at_k == {1: 0.5}
    assert report.tasks == 2


def test_our_own_failures_and_cancelled_jobs_are_left_out(store: Store) -> None:
    batch = batch_of(store, ("a", Verdict.PASSED), ("a", Verdict.SANDBOX_ERROR), ("b", Verdict.CANCELLED))
    report = batch.report()
    assert report.pass_at_k == {1: 1.0}
    assert (report.tasks, report.excluded, report.finished, report.total) == (1, 2, 3, 3)


def test_a_job_without_a_task_is_a_problem_of_its_own_and_7_is_not_the_text_7(store: Store) -> None:
    batch = batch_of(
        store, (None, Verdict.PASSED), (None, Verdict.WRONG_ANSWER), (7, Verdict.PASSED), ("7", Verdict.PASSED)
    )
    assert batch.report().tasks == 4
    assert batch.report().pass_at_k == {1: 0.75}


def test_a_batch_without_results_has_a_report_too(store: Store) -> None:
    store.add_batch("1" * 22, [JobSpec(code="x")], None, None)
    report = BatchHandle("1" * 22).report()
    assert report.pass_at_k == {}
    assert (report.finished, report.total, report.jobs_per_second) == (0, 1, 0.0)
    Console(quiet=True).print(summary.render(report))


def test_the_terminal_shows_verdicts_scores_coverage_and_usage(store: Store) -> None:
    batch = batch_of(store, ("a", Verdict.PASSED), ("b", Verdict.MEMORY_LIMIT), ("c", Verdict.SANDBOX_ERROR))
    console = Console(file=io.StringIO(), width=100)
    console.print(summary.render(batch.report()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    sample = "2 problems, 2 samples"
    for expected in ("passed", "memory_limit", "pass@1", "0.5000", sample, "0.500 s", "1.0 MiB", "left out"):
        assert expected in text


def shown(batch: BatchHandle, **asked: tuple[int, ...]) -> str:
    """The report as a terminal shows it."""
    console = Console(file=io.StringIO(), width=80)
    console.print(summary.render(batch.report(**asked)))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_terminal_says_why_there_is_no_score(store: Store) -> None:
    batch = batch_of(store, ("a", Verdict.PASSED), ("a", Verdict.PASSED))
    assert "There is no pass@k: a problem has 2 scored samples, and k must not be larger" in shown(batch, k=(5,))
    assert "There is no pass@k" not in shown(batch, k=(2, 5))


def test_the_terminal_says_why_samples_failed_the_most_frequent_reason_first(store: Store) -> None:
    specs = [JobSpec(code="x", task_id="t")] * 7
    batch_id = store.add_batch("2" * 22, specs, None, None)
    for seq, detail in enumerate(["KeyError: 'a'", "exit code 3", *["KeyError: 'a'"] * 2]):
        record(store, [f"{batch_id}-{seq:06d}"], Verdict.RUNTIME_ERROR, detail=detail)
    record(store, [f"{batch_id}-000004"], Verdict.WRONG_ANSWER, detail="1 of 3 cases passed; case 2: it differs")
    record(store, [f"{batch_id}-000005"], Verdict.PASSED, detail="passed")
    report = BatchHandle(batch_id).report()
    assert report.failures[0] == (Verdict.RUNTIME_ERROR, "KeyError: 'a'", 3)
    assert set(report.failures[1:]) == {
        (Verdict.RUNTIME_ERROR, "exit code 3", 1), (Verdict.WRONG_ANSWER, "it differs", 1),
    }  # fmt: skip
    record(store, [f"{batch_id}-000006"], Verdict.COMPILE_ERROR, detail="many words " * 50)
    assert "│ runtime_error │         3 │ KeyError: 'a' " in shown(BatchHandle(batch_id))
    assert "1 problem, 7 samples" in shown(BatchHandle(batch_id))


def test_progress_without_a_terminal_is_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=80)
    with Display(console) as display:
        display.update(Progress(total=4, queued=4))
        assert console.file.getvalue() == ""  # type: ignore[attr-defined]
        monkeypatch.setattr("evalpool.api.display.LINE_EVERY", 0.0)
        monkeypatch.setattr("evalpool.api.display.STUCK_AFTER", 0.0)
        display.update(Progress(total=4, queued=3, finished=1, verdicts={Verdict.PASSED: 1}))
    line, stuck = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert line.startswith("1 of 4 finished, ")
    assert line.endswith("passed 1")
    assert "is a worker running?" in stuck


def test_progress_on_a_terminal_is_a_live_bar() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Display(console) as display:
        display.update(Progress(total=4, queued=1, finished=3, verdicts={Verdict.PASSED: 2, Verdict.TIME_LIMIT: 1}))
    assert "3/4" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "time_limit 1" in console.file.getvalue()  # type: ignore[attr-defined]
