"""The states of jobs in the rows, and those that callers see."""

from evalpool.schemas import State, Verdict
from evalpool.schemas.verdict import FINAL, HELD, OPEN, TWIN, WAITING


def test_there_are_four_states() -> None:
    assert [*State] == ["queued", "running", "finished", "cancelled"]


def test_callers_see_a_job_that_waits_for_whatever_reason_as_queued() -> None:
    assert {State.of(stored) for stored in WAITING} == {State.QUEUED}
    assert [State.of(stored) for stored in State] == [*State]


def test_every_state_of_a_row_is_either_open_or_final() -> None:
    assert sorted((*OPEN, *FINAL)) == sorted((*State, TWIN, HELD))
    assert {state for state in State if state.final} == set(FINAL)


def test_only_the_verdict_cancelled_leads_to_the_state_cancelled() -> None:
    assert [verdict for verdict in Verdict if State.after(verdict) is State.CANCELLED] == [Verdict.CANCELLED]
    assert all(State.after(verdict).final for verdict in Verdict)
