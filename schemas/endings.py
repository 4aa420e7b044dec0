"""How jobs end. The transaction that moves a job to a final state also writes its result, so that every job gets
exactly one. It also updates the counts of the batch, and ends the twins (identical jobs) that wait for this result."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, case, literal, null, select, update

from evalpool.schemas import dedup, rows
from evalpool.schemas.database import clock, upsert
from evalpool.schemas.result import Result
from evalpool.schemas.statements import Insertion, Statement, among, one_of
from evalpool.schemas.tables import CASES, JOBS, RESULTS, TALLIES, TWINS, CaseRow, ResultRow
from evalpool.schemas.verdict import OPEN, State, Verdict

CANCELLED_WAITING, CANCELLED_RUNNING = "the job was cancelled before it ran", "the job was cancelled while it ran"
"""The `detail` of cancelled jobs."""

_BLANK = ResultRow(job_id="", batch_id="", verdict="", finished_at=0, size=0).model_dump()


def _finishing(postgres: bool) -> Any:
    """Move the open ones of these jobs to their final state."""
    open_ones = select(JOBS.c.id).where(among(JOBS.c.id, "ids", postgres), one_of(JOBS.c.state, OPEN))
    state = case((among(JOBS.c.id, "cancelled", postgres), State.CANCELLED.value), else_=State.FINISHED.value)
    return (
        update(JOBS)
        .where(JOBS.c.id.in_(open_ones.order_by(JOBS.c.id).with_for_update()))  # in the same order as `lock`
        .values(state=state, lease_until=null())
        .returning(JOBS.c.id)
    )


_finish = Statement(_finishing)
_waited_for = Statement(
    lambda postgres: select(JOBS.c.twin_of).where(TWINS, among(JOBS.c.twin_of, "ids", postgres)).distinct()
)
_add_results = Insertion(RESULTS, list(_BLANK), returned="job_id")
_add_cases = Insertion(CASES, list(CaseRow.model_fields))
_add_counts = Insertion(TALLIES, ["batch_id", "verdict", "writer", "count"], sum_of="count")


def record(db: Connection, results: Sequence[Result], writer: str) -> set[str]:
    """Store the results of jobs that have none yet. Returns the jobs that got a result, their twins included."""
    by_id = {result.job_id: result for result in reversed(results)}  # the first one of a job wins
    cancelled = [each for each, result in by_id.items() if State.after(result.verdict) is State.CANCELLED]
    ended = sorted(row[0] for row in _finish.run(db, ids=list(by_id), cancelled=cancelled))
    new = _insert(db, [rows.result_row(by_id[job_id]) for job_id in ended], writer)
    cases = [row for job_id in ended if job_id in new for row in rows.case_rows(by_id[job_id])]
    if cases:
        _add_cases.run(db, cases)
    return new | share(db, new, writer)


def end(db: Connection, which: Any, verdict: Verdict, detail: str, writer: str = "") -> set[str]:
    """Give these jobs a result without running them. Returns the jobs that got one, their twins included."""
    ended = db.scalars(
        update(JOBS)
        .where(which, JOBS.c.state.in_(OPEN))
        .values(state=State.after(verdict), lease_until=null())
        .returning(JOBS.c.id)
    ).all()
    # The database makes these rows itself: sending thousands of rows that differ in a few columns takes long.
    own = {"job_id": JOBS.c.id, "batch_id": JOBS.c.batch_id, "attempt": JOBS.c.attempt, "finished_at": clock()}
    blank = _BLANK | {"verdict": verdict.value, "detail": detail}
    columns = [own.get(column.name, literal(blank[column.name], column.type)) for column in RESULTS.c]
    new: set[str] = set()
    for part in rows.parts(ended):
        alike = select(*columns).where(JOBS.c.id.in_(part))
        add = upsert(db, RESULTS).from_select(list(RESULTS.c.keys()), alike).on_conflict_do_nothing()
        stored = db.execute(add.returning(RESULTS.c.job_id, RESULTS.c.batch_id)).all()
        tally(db, Counter((row.batch_id, verdict.value) for row in stored), writer)
        new |= {row.job_id for row in stored}
    return new | share(db, new, writer)


def share(db: Connection, leaders: Collection[str], writer: str = "") -> set[str]:
    """Give the twins of these leaders copies of their results. If a leader failed by our own fault or was cancelled,
    queue one of its twins instead. Returns the jobs that got a result."""
    served: set[str] = set()
    while leaders:
        waited_for = [row[0] for row in _waited_for.run(db, ids=list(leaders))]
        if not waited_for:
            break
        given = select(RESULTS.c.job_id, RESULTS.c.verdict).where(RESULTS.c.job_id.in_(waited_for))
        verdicts = {row.job_id: Verdict(row.verdict) for row in db.execute(given)}
        scored = [leader for leader, verdict in verdicts.items() if verdict.scored]
        for failed in sorted(verdicts.keys() - set(scored)):
            dedup.promote(db, failed)
        # A twin can have twins of its own: two processes that feed one stream do not know each other's leaders.
        leaders = _copy(db, scored, verdicts, writer) if scored else set()
        served |= leaders
    return served


def lock(db: Connection, job_ids: Iterable[str], states: Collection[str]) -> list[str]:
    """Lock those of these jobs that are in one of the states, and return their ids. All writers lock rows in the order
    of their ids, so that they cannot deadlock."""
    rows_of = select(JOBS.c.id).where(JOBS.c.id.in_(job_ids), JOBS.c.state.in_(states))
    return list(db.scalars(rows_of.order_by(JOBS.c.id).with_for_update()))


def tally(db: Connection, counts: Counter[tuple[str, str]], writer: str) -> None:
    """Add these numbers, by batch id and verdict, to the counts of the batches."""
    added = [
        {"batch_id": batch_id, "verdict": verdict, "writer": writer, "count": count}
        for (batch_id, verdict), count in sorted(counts.items())
    ]
    if added:
        _add_counts.run(db, added)


def _insert(db: Connection, results: Sequence[dict[str, Any]], writer: str) -> set[str]:
    """Store rows of results, and count them. A result that exists already stays as it is. Returns the ids of the jobs
    whose result is new."""
    if not results:
        return set()
    new = _add_results.run(db, results)
    tally(db, Counter((row["batch_id"], row["verdict"]) for row in results if row["job_id"] in new), writer)
    return new


def _copy(db: Connection, leaders: Sequence[str], verdicts: dict[str, Verdict], writer: str) -> set[str]:
    """Finish the twins of these leaders with copies of their results. Returns the ids of the twins."""
    done = db.execute(
        update(JOBS)
        .where(dedup.of(leaders))
        .values(state=State.FINISHED)
        .returning(JOBS.c.id, JOBS.c.batch_id, JOBS.c.twin_of)
    ).all()
    ids = [row.id for row in done]
    own = {"job_id": JOBS.c.id, "batch_id": JOBS.c.batch_id, "finished_at": clock()}
    for part in rows.parts(ids):
        _copy_rows(db, RESULTS, part, **own, shared_with=RESULTS.c.job_id)
        _copy_rows(db, CASES, part, job_id=JOBS.c.id)
    tally(db, Counter((row.batch_id, verdicts[row.twin_of].value) for row in done), writer)
    return set(ids)


def _copy_rows(db: Connection, table: Any, job_ids: Sequence[str], **own: Any) -> None:
    """Copy the rows that the leaders of these jobs have in this table."""
    columns = {column.name: own.get(column.name, column) for column in table.c}
    copies = select(*columns.values()).where(JOBS.c.id.in_(job_ids), table.c.job_id == JOBS.c.twin_of)
    db.execute(upsert(db, table).from_select(list(columns), copies).on_conflict_do_nothing())
