"""The states of jobs in the rows, and those that callers see."""

from evalpool.schemas import State, Verdict
from evalpool.schemas.verdict import FINAL, OPEN, WAITING


def test_callers_see_only_the_four_public_states() -> None:
    assert {state.public for state in State} == {State.QUEUED, State.RUNNING, State.FINISHED, State.CANCELLED}
    assert {state for state in State if state.public is State.QUEUED} == set(WAITING)


def test_every_state_is_either_open_or_final() -> None:
    assert sorted((*OPEN, *FINAL)) == sorted(State)
    assert {state for state in State if state.final} == set(FINAL)


def test_only_the_verdict_cancelled_leads_to_the_state_cancelled() -> None:
    assert [verdict for verdict in Verdict if State.after(verdict) is State.CANCELLED] == [Verdict.CANCELLED]
    assert all(State.after(verdict).final for verdict in Verdict)
