"""Every case through the whole stack: a real queue, a real worker, real containers; and nothing may be left of it."""

from typing import Any

import pytest

from tests.hostile.case import HostileCase, load
from tests.hostile.stack import Stack

pytestmark = [pytest.mark.docker, pytest.mark.redis]

CASES = load()
FAST = [case for case in CASES if case.fast]
COLD = {"env": {"PYTHONNOUSERSITE": "1"}}
"""A job that sets a PYTHON… variable gets an interpreter of its own instead of a fork of the warm one."""


def _rounds() -> list[Any]:
    """All cases twice on the same sandboxes; then the fast ones on fresh sandboxes and in cold interpreters."""
    python = [case for case in FAST if case.tool == "python_executor" and not case.env]
    rounds: tuple[tuple[str, list[HostileCase], dict[str, Any]], ...] = (
        ("first", CASES, {}),
        ("second", CASES, {}),
        ("fresh", FAST, {"isolation": "fresh"}),
        ("cold", python, COLD),
    )
    return [
        pytest.param(case, more, id=f"{name}-{case.id}", marks=[pytest.mark.fast] if case.fast else [])
        for name, cases, more in rounds
        for case in cases
    ]


@pytest.mark.parametrize(("case", "more"), _rounds())
def test_a_hostile_program_gets_its_verdict_and_nothing_else(
    stack: Stack, case: HostileCase, more: dict[str, Any]
) -> None:
    start = stack.log_size()
    stack.check(stack.run(case, **more), start)


def test_every_row_of_the_table_has_a_case() -> None:
    assert {case.number for case in CASES} >= set(range(1, 76)) - {31, 68}  # these two are tests of their own, below
    assert len([case for case in CASES if case.number > 100]) >= 15
