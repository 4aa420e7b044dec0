"""Every query of evalpool, each with a sentence. What it does not say about a job is not known of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, func, insert, literal, null, or_, select, text, true, union_all, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import SQLModel

from schemas import rows
from schemas.batch import Batch, Progress
from schemas.database import Database, clock
from schemas.errors import BatchNotFound, JobNotFound
from schemas.job import JobSpec
from schemas.lease import Lease
from schemas.result import Result
from schemas.tables import FINAL_STATE, ResultRow
from schemas.verdict import Priority, State, Verdict

IDS_AT_ONCE = 5000
"""Ids in one statement; SQLite takes at most 32,766 variables."""

_jobs = SQLModel.metadata.tables["jobs"]
_batches = SQLModel.metadata.tables["batches"]
_results = SQLModel.metadata.tables["results"]
_cases = SQLModel.metadata.tables["cases"]
_turns = SQLModel.metadata.tables["turns"]
_letters = SQLModel.metadata.tables["letters"]
# spelt out: only then do partial indexes apply
_QUEUED, _RUNNING = text("jobs.state = 'queued'"), text("jobs.state = 'running'")
_joined = (_results, _jobs.c.task_id, _jobs.c.sample_id, _jobs.c.labels, _jobs.c.created_at)


class Store:
    """The one door to the rows."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def ping(self) -> None:
        """Raises when the database does not answer."""
        with self.database.read() as db:
            db.execute(select(literal(1)))

    # -- submission --------------------------------------------------------------------------------

    def add_batch(self, batch_id: str, specs: Sequence[JobSpec], name: str | None, key: str | None) -> str:
        """Store a batch and its jobs, all or nothing; the id of the batch that has this key already, if one has.

        The n-th job of a batch gets the n-th turn from now on: batches share the slots, a priority is a head start.
        """
        with self.database.write() as db:
            now, turn = db.execute(select(clock(), _turns.c.value)).one()
            batch = {
                "id": batch_id, "name": name, "idempotency_key": key, "total": len(specs), "created_at": now,
            }  # fmt: skip
            added = db.execute(_upsert(db, _batches).on_conflict_do_nothing().returning(_batches.c.id), [batch]).all()
            if not added:
                return str(db.scalar(select(_batches.c.id).where(_batches.c.idempotency_key == key)))
            for start in range(0, len(specs), IDS_AT_ONCE):
                part = specs[start : start + IDS_AT_ONCE]
                db.execute(
                    insert(_jobs), [rows.job_row(batch_id, start + i, spec, now, turn) for i, spec in enumerate(part)]
                )
        return batch_id

    def mark_published(self, job_ids: Sequence[str]) -> None:
        """Note that Redis has been told of these jobs."""
        with self.database.write() as db:
            for part in _parts(job_ids):
                db.execute(update(_jobs).where(_jobs.c.id.in_(part)).values(published_at=clock()))

    # -- leases ------------------------------------------------------------------------------------

    def lease(self, count: int, worker: str, seconds: float) -> list[Lease]:
        """Claim so many of the waiting jobs, in the order of their turns; each claim is one more attempt."""
        ours = or_(_jobs.c.lease_until.is_(None), _jobs.c.worker != worker, _jobs.c.lease_until < clock())
        first = [
            select(
                select(_jobs.c.id, _jobs.c.rank)
                .where(_QUEUED, _jobs.c.priority == priority.value, _jobs.c.cancelled_at.is_(None), ours)
                .order_by(_jobs.c.rank)
                .limit(count)
                .with_for_update(skip_locked=True)  # PostgreSQL: what another worker is just claiming
                .subquery()
            )
            for priority in Priority
        ]
        next_ones = union_all(*first).subquery()
        claim = (
            update(_jobs)
            .where(_jobs.c.id.in_(select(next_ones.c.id).order_by(next_ones.c.rank).limit(count)))
            .values(
                state=State.RUNNING, attempt=_jobs.c.attempt + 1, worker=worker,
                lease_until=clock() + seconds, started_at=clock(),
            )
            .returning(
                _jobs.c.id, _jobs.c.batch_id, _jobs.c.spec, _jobs.c.attempt, _jobs.c.created_at, _jobs.c.started_at,
                _jobs.c.rank, _jobs.c.priority, _jobs.c.failures,
            )
        )  # fmt: skip
        with self.database.write() as db:
            claimed = db.execute(claim).all()
            if claimed:
                reached = max(row.rank - rows.HEAD_START[Priority(row.priority)] for row in claimed)
                # Whoever holds this row may have been cut off: it is not worth waiting for.
                behind = select(_turns.c.id).where(_turns.c.value < reached).with_for_update(skip_locked=True)
                db.execute(update(_turns).where(_turns.c.id.in_(behind)).values(value=reached))
        return [rows.lease_of(row) for row in sorted(claimed, key=lambda row: (row.rank, row.id))]

    def renew(self, held: Mapping[str, int], worker: str, seconds: float) -> tuple[set[str], set[str]]:
        """Prolong the leases held (job id → attempt); which jobs are no longer ours, and which were cancelled."""
        with self.database.write() as db:
            mine = and_(_jobs.c.worker == worker, _jobs.c.state == State.RUNNING)
            kept: set[str] = set()
            for part in _parts(list(held)):
                prolong = update(_jobs).where(_jobs.c.id.in_(part), mine).values(lease_until=clock() + seconds)
                renewed = db.execute(prolong.returning(_jobs.c.id, _jobs.c.attempt)).all()
                kept |= {row.id for row in renewed if row.attempt == held[row.id]}
            stopped = select(_jobs.c.id).where(_jobs.c.id.in_(kept), _jobs.c.cancelled_at.is_not(None))
            cancelled = set(db.scalars(stopped))
            rest = select(_jobs.c.id, _jobs.c.state, _jobs.c.attempt).where(_jobs.c.id.in_(held.keys() - kept))
            # One that has just been finished, by this very attempt, is not lost.
            lost = {row.id for row in db.execute(rest) if not (State(row.state).final and row.attempt == held[row.id])}
        return lost, cancelled

    def release(self, lease: Lease, failure: str | None = None, shun: float = 0) -> None:
        """Put a job back. Without a failure it was never tried, and gets its attempt back; with one, this worker leaves
        it to others for so many seconds."""
        held = and_(_jobs.c.id == lease.job_id, _jobs.c.attempt == lease.attempt, _jobs.c.state == State.RUNNING)
        failures = "\n".join([*lease.failures, failure.replace("\n", " ")] if failure else lease.failures) or None
        with self.database.write() as db:
            db.execute(
                update(_jobs)
                .where(held)
                .values(
                    state=State.QUEUED, published_at=null(), failures=failures,
                    attempt=_jobs.c.attempt if failure else _jobs.c.attempt - 1,
                    lease_until=clock() + shun if failure and shun else null(),
                )
            )  # fmt: skip
            _end_cancelled(db, _jobs.c.id == lease.job_id)

    def expire(self, max_attempts: int) -> int:
        """Put back every job whose lease has run out, or end it after so many attempts; how many there were."""
        late = and_(_RUNNING, _jobs.c.lease_until < clock())
        with self.database.write() as db:
            given_up = and_(late, _jobs.c.attempt >= max_attempts)
            ended = _end(
                db, given_up, Verdict.SANDBOX_ERROR, f"its worker fell silent at the last of {max_attempts} attempts"
            )
            put_back = update(_jobs).where(late).values(state=State.QUEUED, lease_until=null(), published_at=null())
            expired = db.execute(put_back).rowcount
            if expired:
                _end_cancelled(db, true())
            return expired + ended

    def unannounced(
        self, *, grace: float, stale: float | None, limit: int, batch_id: str | None = None
    ) -> list[tuple[str, str]]:
        """Waiting jobs, as (id, priority), that Redis was not told of within `grace` seconds of their submission, that
        were put back after an attempt, or — where `stale` is given — that it was told of more than so long ago."""
        due = and_(_jobs.c.published_at.is_(None), or_(_jobs.c.attempt > 0, _jobs.c.created_at < clock() - grace))
        if stale is not None:
            due = or_(due, _jobs.c.published_at < clock() - stale)
        within = true() if batch_id is None else _jobs.c.batch_id == batch_id
        query = select(_jobs.c.id, _jobs.c.priority).where(_QUEUED, due, within)
        with self.database.read() as db:
            return [(row.id, row.priority) for row in db.execute(query.limit(limit))]

    def bury(self, worker: str, reason: str, body: str) -> None:
        """Keep a message that nobody could read."""
        with self.database.write() as db:
            db.execute(insert(_letters).values(worker=worker, reason=reason, body=body, arrived_at=clock()))

    def letters(self) -> int:
        """How many such messages there are."""
        with self.database.read() as db:
            return db.scalar(select(func.count()).select_from(_letters)) or 0

    # -- results -----------------------------------------------------------------------------------

    def record(self, results: Sequence[Result]) -> set[str]:
        """Store results, all in one commit; the first one of a job wins. The job ids that were new."""
        if not results:
            return set()
        first = {result.job_id: result for result in reversed(results)}
        ordered = [first[job_id] for job_id in sorted(first)]  # one order for all writers: no deadlock
        with self.database.write() as db:
            added = db.execute(
                _upsert(db, _results).on_conflict_do_nothing().returning(_results.c.job_id),
                [rows.result_row(result) for result in ordered],
            ).scalars()
            new = set(added)
            cases = [row for result in ordered if result.job_id in new for row in rows.case_rows(result)]
            if cases:
                db.execute(insert(_cases), cases)
            for state in (State.FINISHED, State.CANCELLED):
                ended = [r.job_id for r in ordered if r.job_id in new and FINAL_STATE[r.verdict] is state]
                if ended:
                    db.execute(update(_jobs).where(_jobs.c.id.in_(ended)).values(state=state, lease_until=null()))
        return new

    def cancel(self, *, batch_id: str | None = None, job_id: str | None = None) -> int:
        """End the waiting jobs of a batch, or one job, and ask for the end of the running ones; how many ended here."""
        chosen = _jobs.c.batch_id == batch_id if job_id is None else _jobs.c.id == job_id
        with self.database.write() as db:
            marked = update(_batches).where(_batches.c.id == batch_id, _batches.c.cancelled_at.is_(None))
            db.execute(marked.values(cancelled_at=clock()))
            open_ones = _jobs.c.state.in_([State.QUEUED, State.RUNNING])
            db.execute(update(_jobs).where(chosen, open_ones).values(cancelled_at=clock()))
            return _end_cancelled(db, chosen)

    # -- reading -----------------------------------------------------------------------------------

    def batch(self, batch_id: str) -> Batch:
        """One batch, or `BatchNotFound`."""
        with self.database.read() as db:
            row = db.execute(select(_batches).where(_batches.c.id == batch_id)).one_or_none()
        if row is None:
            raise BatchNotFound(batch_id)
        return Batch(
            id=row.id, name=row.name, idempotency_key=row.idempotency_key, total=row.total,
            created_at=rows.moment(row.created_at), cancelled=row.cancelled_at is not None,
        )  # fmt: skip

    def state(self, job_id: str) -> State:
        """How far a job has come, or `JobNotFound`."""
        with self.database.read() as db:
            found = db.scalar(select(_jobs.c.state).where(_jobs.c.id == job_id))
        if found is None:
            raise JobNotFound(job_id)
        return State(found)

    def progress(self, batch_id: str) -> Progress:
        """How many jobs of a batch are in which state, and which verdicts there are."""
        states = select(_jobs.c.state, func.count()).where(_jobs.c.batch_id == batch_id).group_by(_jobs.c.state)
        verdicts = (
            select(_results.c.verdict, func.count()).where(_results.c.batch_id == batch_id).group_by(_results.c.verdict)
        )
        with self.database.read() as db:
            counts = {str(state): int(count) for state, count in db.execute(states)}
            given = {Verdict(verdict): int(count) for verdict, count in db.execute(verdicts)}
        return Progress(total=sum(counts.values()), verdicts=given, **counts)

    def done(self, batch_id: str) -> set[str]:
        """The ids of a batch's jobs that have a result."""
        with self.database.read() as db:
            return set(db.scalars(select(_results.c.job_id).where(_results.c.batch_id == batch_id)))

    def results(self, job_ids: Sequence[str]) -> list[Result]:
        """The results there are among these jobs, in the order of submission."""
        found: list[Result] = []
        with self.database.read() as db:
            for part in _parts(job_ids):
                found += _results_where(db, _results.c.job_id.in_(part), _cases.c.job_id.in_(part))
        return found

    def batch_results(self, batch_id: str) -> Iterator[Result]:
        """Every result of a batch, in the order of submission, a part at a time."""
        for start in range(0, self.batch(batch_id).total, IDS_AT_ONCE):
            span = and_(_jobs.c.batch_id == batch_id, _jobs.c.seq >= start, _jobs.c.seq < start + IDS_AT_ONCE)
            with self.database.read() as db:
                found = _results_where(db, span, _cases.c.job_id.in_(select(_jobs.c.id).where(span)))
            yield from found

    def measures(self, batch_id: str) -> list[Any]:
        """What a report needs of each result: task, verdict, times, memory, and when it was finished."""
        query = select(
            _jobs.c.task_id, _jobs.c.seq, _results.c.verdict, _results.c.cpu_seconds, _results.c.wall_seconds,
            _results.c.peak_memory_bytes, _results.c.finished_at,
        )  # fmt: skip
        joined = query.join(_jobs, _jobs.c.id == _results.c.job_id).where(_results.c.batch_id == batch_id)
        with self.database.read() as db:
            return list(db.execute(joined))


def _end_cancelled(db: Connection, which: Any) -> int:
    """Give the waiting jobs whose end was asked for their result; how many there were."""
    return _end(
        db, and_(which, _QUEUED, _jobs.c.cancelled_at.is_not(None)), Verdict.CANCELLED, "cancelled before it ran"
    )


def _end(db: Connection, which: Any, verdict: Verdict, detail: str) -> int:
    """Give these jobs a result without a run; how many there were."""
    blank = ResultRow(job_id="", batch_id="", verdict=verdict, detail=detail, finished_at=0).model_dump()
    values: dict[str, Any] = {name: literal(value, _results.c[name].type) for name, value in blank.items()}
    values |= {"job_id": _jobs.c.id, "batch_id": _jobs.c.batch_id, "attempt": _jobs.c.attempt, "finished_at": clock()}
    db.execute(insert(_results).from_select(list(values), select(*values.values()).where(which)))
    return db.execute(update(_jobs).where(which).values(state=FINAL_STATE[verdict], lease_until=null())).rowcount


def _upsert(db: Connection, table: Any) -> Any:
    return (postgresql if db.dialect.name == "postgresql" else sqlite).insert(table)


def _parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), IDS_AT_ONCE):
        yield ids[start : start + IDS_AT_ONCE]


def _results_where(db: Connection, which: Any, which_cases: Any) -> list[Result]:
    query = select(*_joined).join(_jobs, _jobs.c.id == _results.c.job_id).where(which)
    found = db.execute(query.order_by(_jobs.c.batch_id, _jobs.c.seq)).mappings().all()
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for case in db.execute(select(_cases).where(which_cases).order_by(_cases.c.job_id, _cases.c.index)).mappings():
        cases.setdefault(case["job_id"], []).append(dict(case))
    return [rows.result_of(dict(row), cases.get(row["job_id"], ())) for row in found]
