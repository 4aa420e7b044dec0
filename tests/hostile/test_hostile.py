"""Every case goes through a real queue, a real worker and real containers, and must leave nothing behind."""

from typing import Any

import pytest

from evalpool.api import connections, submit_batch
from evalpool.api.reports.page import page
from evalpool.schemas import JobSpec, Limits, Verdict
from tests.conftest import PATIENCE
from tests.hostile.case import HostileCase, load
from tests.hostile.stack import Stack

pytestmark = [pytest.mark.docker, pytest.mark.redis]

CASES = load()
FAST = [case for case in CASES if case.fast]
COLD = {"env": {"PYTHONNOUSERSITE": "1"}}
"""A job that sets a PYTHON… variable gets an interpreter of its own instead of a fork of the warm one."""
HARNESS = {*range(7, 13), *range(33, 45), *range(59, 61), *range(69, 110), 115, 116, 117, 119, 120, 121, 132}
SEEDS = range(1, 21)
TRIES = 3
"""How often a case is run if something was slower than it should be."""


def _rounds() -> list[Any]:
    """Return all cases twice, for the same sandboxes; then the fast ones, for fresh sandboxes; then those about the
    harness, for cold interpreters."""
    python = [case for case in FAST if case.number in HARNESS and case.tool == "python_executor" and not case.env]
    rounds: tuple[tuple[str, list[HostileCase], dict[str, Any]], ...] = (
        ("first", CASES, {}),
        ("second", CASES, {}),
        ("fresh", FAST, {"isolation": "fresh"}),
        ("cold", python, COLD),
    )
    return [
        pytest.param(
            case, more, id=f"{name}-{case.id}", marks=[pytest.mark.fast] if name == "first" and case.fast else []
        )
        for name, cases, more in rounds
        for case in cases
    ]


@pytest.mark.parametrize(("case", "more"), _rounds())
def test_a_hostile_program_gets_its_verdict_and_nothing_else(
    stack: Stack, case: HostileCase, more: dict[str, Any]
) -> None:
    for _ in range(TRIES):  # what a program does, it does again; what a busy machine does, probably not
        start = stack.log_size()
        seen = stack.run(case, **more)
        if not stack.disturbed(seen, start):
            break
    stack.check(seen, start)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.fast] if n < 3 else []) for n in SEEDS])
def test_random_system_calls_break_nothing(stack: Stack, seed: int) -> None:
    """This is row 68 of the table, with a fixed list of seeds."""
    (fuzzer,) = (case for case in CASES if case.number == 68)
    start = stack.log_size()
    stack.check(stack.run(fuzzer.model_copy(update={"stdin": str(seed)})), start)


@pytest.mark.fast
def test_a_lock_on_a_file_of_the_image_does_not_reach_other_sandboxes(stack: Stack) -> None:
    """This is row 31 of the table."""
    limits = Limits(cpu_seconds=2, wall_seconds=20)
    lock = "import fcntl, os, time\nfile = open(os.__file__)\n"
    hold = lock + "fcntl.flock(file, fcntl.LOCK_EX)\nfcntl.lockf(open(os.__file__), fcntl.LOCK_SH)\ntime.sleep(1.5)"
    look = lock + (
        "taken = 0\n"
        "for _ in range(100):\n"
        "    try:\n"
        "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "        fcntl.flock(file, fcntl.LOCK_UN)\n"
        "    except BlockingIOError:\n"
        "        taken += 1\n"
        "    time.sleep(0.01)\n"
        "print(taken)"
    )
    batch = submit_batch([JobSpec(code=hold, limits=limits), JobSpec(code=look, limits=limits)])
    batch.wait(timeout=PATIENCE)
    holder, looker = batch.results()
    assert holder.sandbox_id != looker.sandbox_id
    assert (holder.verdict, looker.verdict, looker.stdout) == (Verdict.PASSED, Verdict.PASSED, "0\n")


@pytest.mark.fast
def test_markup_that_a_program_prints_is_shown_as_text(stack: Stack) -> None:
    """This is row 42 of the table."""
    hostile = "</pre></td><script>alert(1)</script><img src=x onerror=alert(1)>{title}{{7*7}}%s"
    jobs = [JobSpec(code=f"raise ValueError({hostile!r})", task_id=hostile)]
    batch = submit_batch(jobs, name=hostile)
    batch.wait(timeout=PATIENCE)
    shown = page(batch.report(), batch.stream, connections.store().specs)
    assert "&lt;script&gt;alert(1)" in shown
    assert shown.count("<script") == 1  # the page's own
    assert "<img" not in shown


def test_every_row_of_the_table_has_a_case() -> None:
    two_sandboxes_at_once = {31}  # has its own test above
    assert {case.number for case in CASES} >= set(range(1, 76)) - two_sandboxes_at_once
    assert len([case for case in CASES if case.number > 100]) >= 15
