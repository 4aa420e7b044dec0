"""Every query of evalpool, each with a sentence: here those that write, in `schemas.reader` those that read, in
`schemas.twins` those about identical jobs. What they do not say about a job is not known of it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, func, insert, literal, null, or_, select, text, true, union_all, update
from sqlmodel import SQLModel

from schemas import rows, twins
from schemas.database import clock, insert_many, upsert
from schemas.job import JobSpec
from schemas.lease import Lease
from schemas.reader import Reader, parts
from schemas.result import Result
from schemas.tables import FINAL_STATE, TWIN, ResultRow
from schemas.verdict import Priority, State, Verdict

_jobs = SQLModel.metadata.tables["jobs"]
_batches = SQLModel.metadata.tables["batches"]
_results = SQLModel.metadata.tables["results"]
_cases = SQLModel.metadata.tables["cases"]
_turns = SQLModel.metadata.tables["turns"]
_letters = SQLModel.metadata.tables["letters"]
# spelt out: only then do partial indexes apply
_QUEUED, _RUNNING = text("jobs.state = 'queued'"), text("jobs.state = 'running'")


class Store(Reader):
    """The one door to the rows."""

    # -- submission --------------------------------------------------------------------------------

    def add_batch(
        self,
        batch_id: str,
        specs: Sequence[JobSpec],
        name: str | None,
        key: str | None,
        digests: Sequence[str] | None = None,
    ) -> str:
        """Store a batch and its jobs, all or nothing; the id of the batch that has this key already, if one has. With
        digests, jobs of the same one are run once."""
        with self.database.write() as db:
            stored, _ = _open(db, batch_id, len(specs), name, key, {})
            if stored == batch_id:
                turn = db.scalar(select(_turns.c.value)) or 0.0
                leaders = twins.leaders(batch_id, 0, digests, {}) if digests else {}
                added = [rows.job_row(batch_id, seq, spec, turn) for seq, spec in enumerate(specs)]
                _add(db, added, digests, leaders)
        return stored

    def open_batch(
        self, batch_id: str, total: int, name: str | None, key: str | None, about: Mapping[str, Any]
    ) -> tuple[str, int, float]:
        """Store a batch whose jobs follow in parts. Its id, or that of the batch that has this key already; how many of
        its jobs are there; and how far the turns have come."""
        with self.database.write() as db:
            stored, there = _open(db, batch_id, total, name, key, about)
            return stored, there, db.scalar(select(_turns.c.value)) or 0.0

    def add_jobs(
        self,
        batch_id: str,
        start: int,
        specs: Sequence[JobSpec],
        turn: float,
        digests: Sequence[str] | None = None,
        leaders: Mapping[int, str] | None = None,
    ) -> set[str]:
        """Store the jobs of a batch from its `start`-th on. Those that have a leader (place in the batch → job id) get
        its result, now or when it is there; which of them have it now."""
        added = [rows.job_row(batch_id, start + i, spec, turn) for i, spec in enumerate(specs)]
        with self.database.write() as db:
            if leaders:
                twins.hold(db, set(leaders.values()))
            _add(db, added, digests, leaders or {})
            return twins.share(db, set(leaders.values())) if leaders else set()

    def known(self, digests: Sequence[str]) -> dict[str, str]:
        """Jobs that were run in earlier batches, by the digest they share with these."""
        with self.database.read() as db:
            return twins.known(db, digests)

    def mark_published(self, job_ids: Sequence[str]) -> None:
        """Note that Redis has been told of these jobs."""
        with self.database.write() as db:
            for part in parts(job_ids):
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
            for part in parts(list(held)):
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

    # -- results -----------------------------------------------------------------------------------

    def record(self, results: Sequence[Result]) -> set[str]:
        """Store results, all in one commit; the first one of a job wins. The job ids that were new."""
        if not results:
            return set()
        first = {result.job_id: result for result in reversed(results)}
        ordered = [first[job_id] for job_id in sorted(first)]  # one order for all writers: no deadlock
        with self.database.write() as db:
            added = db.execute(
                upsert(db, _results).on_conflict_do_nothing().returning(_results.c.job_id),
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
            return new | twins.share(db, new)

    def cancel(self, *, batch_id: str | None = None, job_id: str | None = None) -> int:
        """End the waiting jobs of a batch, or one job, and ask for the end of the running ones; how many ended here."""
        chosen = _jobs.c.batch_id == batch_id if job_id is None else _jobs.c.id == job_id
        with self.database.write() as db:
            marked = update(_batches).where(_batches.c.id == batch_id, _batches.c.cancelled_at.is_(None))
            db.execute(marked.values(cancelled_at=clock()))
            db.execute(update(_jobs).where(chosen, _jobs.c.state == TWIN).values(state=State.QUEUED))
            open_ones = _jobs.c.state.in_([State.QUEUED, State.RUNNING])
            db.execute(update(_jobs).where(chosen, open_ones).values(cancelled_at=clock()))
            return _end_cancelled(db, chosen)


def _open(
    db: Connection, batch_id: str, total: int, name: str | None, key: str | None, about: Mapping[str, Any]
) -> tuple[str, int]:
    """The row of a batch, or the one that has this key; its id, and how many jobs it has by now."""
    batch = {
        "id": batch_id, "name": name, "idempotency_key": key, "total": total, "about": json.dumps(about),
        "created_at": db.scalar(select(clock())),
    }  # fmt: skip
    if db.execute(upsert(db, _batches).on_conflict_do_nothing().returning(_batches.c.id), [batch]).all():
        return batch_id, 0
    stored = str(db.scalar(select(_batches.c.id).where(_batches.c.idempotency_key == key)))
    last = db.scalar(select(func.max(_jobs.c.seq)).where(_jobs.c.batch_id == stored))
    return stored, 0 if last is None else last + 1


def _add(
    db: Connection, added: Sequence[dict[str, Any]], digests: Sequence[str] | None, leaders: Mapping[int, str]
) -> None:
    """The rows of some jobs. Those that are there already stay as they are: a submission that was cut off may be taken
    up while its first process still runs."""
    now = db.scalar(select(clock()))
    for place, row in enumerate(added):
        leader = leaders.get(row["seq"])
        row |= {"created_at": now, "twin_of": leader, "digest": digests and digests[place]}
        if leader:
            row["state"] = TWIN
    if added:
        insert_many(db, upsert(db, _jobs).on_conflict_do_nothing(), added)


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
