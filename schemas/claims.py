"""How workers claim jobs, renew their leases and give jobs back. Each query runs in the transaction of its caller."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from sqlalchemy import Connection, Row, and_, null, or_, select, union_all, update

from evalpool.schemas import endings, entries, rows
from evalpool.schemas.base import first_problem
from evalpool.schemas.database import clock
from evalpool.schemas.job import JobSpec
from evalpool.schemas.lease import Claim, Lease, Renewal
from evalpool.schemas.tables import JOBS, QUEUED, RUNNING, TURNS
from evalpool.schemas.verdict import FINAL, Priority, State, Verdict

UNREADABLE_SECONDS = 3600.0
"""How long workers of a version that cannot read a job leave it to other versions."""


class Claimed(NamedTuple):
    """The rows of jobs that were just claimed."""

    rows: Sequence[Row[Any]]
    passed_over: bool
    """Whether fewer jobs than asked for were found while others were locked by another transaction."""


def claim(
    db: Connection, count: int, worker: str, seconds: float, *, fleet: str, version: str, without: Collection[str]
) -> Claimed:
    """Claim up to `count` queued jobs of a fleet in the order of their turns, except those with an image in `without`.
    Each claim is one more attempt."""
    not_ours = JOBS.c.worker.not_in([worker, _unread(version)])
    free = or_(JOBS.c.lease_until.is_(None), not_ours, JOBS.c.lease_until < clock())
    which: list[Any] = [QUEUED, JOBS.c.fleet == fleet, JOBS.c.cancelled_at.is_(None), free]
    if without:
        which.append(or_(JOBS.c.image.is_(None), JOBS.c.image.not_in(without)))
    take = (
        update(JOBS)
        .where(JOBS.c.id.in_(_next(which, count)))
        .values(
            state=State.RUNNING, attempt=JOBS.c.attempt + 1, worker=worker,
            lease_until=clock() + seconds, started_at=clock(),
        )
        .returning(
            JOBS.c.id, JOBS.c.batch_id, JOBS.c.spec, JOBS.c.attempt, JOBS.c.created_at, JOBS.c.started_at,
            JOBS.c.rank, JOBS.c.priority, JOBS.c.failures, JOBS.c.image, JOBS.c.digest,
        )
    )  # fmt: skip
    claimed = db.execute(take).all()
    locks = db.dialect.name == "postgresql" and len(claimed) < count
    passed_over = locks and bool(db.scalar(select(select(JOBS.c.id).where(*which).exists())))
    if claimed and not fleet:  # a private run has one batch, which waits for nobody's turn
        _advance(db, claimed)
    return Claimed(claimed, passed_over)


def read(claimed: Claimed) -> Claim:
    """The leases of claimed rows, and the jobs that this version cannot read."""
    leases: list[Lease] = []
    unreadable: dict[str, str] = {}
    for row in sorted(claimed.rows, key=lambda row: (row.rank, row.id)):
        try:
            leases.append(rows.lease_of(row))
        except ValidationError as error:
            unreadable[row.id] = first_problem(error, JobSpec)
    return Claim(leases, unreadable, claimed.passed_over)


def leave(db: Connection, attempts: Mapping[str, int], worker: str, version: str) -> None:
    """Requeue jobs (job id → attempt) that this version cannot read, for workers of other versions."""
    _untried(db, attempts, worker, worker=_unread(version), lease_until=clock() + UNREADABLE_SECONDS)


def put_back(db: Connection, leases: Collection[Lease], worker: str, shun: float) -> None:
    """Requeue jobs that were never tried; they get their attempt back. Their worker leaves them to other workers for
    `shun` seconds."""
    _untried(db, {lease.job_id: lease.attempt for lease in leases}, worker, lease_until=_until(shun))


def release(db: Connection, lease: Lease, worker: str, failure: str, shun: float) -> None:
    """Requeue a job after a failure of ours. Its worker leaves it to other workers for `shun` seconds."""
    # The attempt number alone does not identify a lease: it is reused when a job is put back untried.
    mine = and_(JOBS.c.attempt == lease.attempt, JOBS.c.worker == worker)
    failures = "\n".join([*lease.failures, failure.replace("\n", " ")])
    requeued = {"state": State.QUEUED, "failures": failures, "lease_until": _until(shun)}
    db.execute(update(JOBS).where(JOBS.c.id == lease.job_id, mine, RUNNING).values(**requeued))
    entries.end_cancelled(db, [lease.job_id])


def disown(db: Connection, job_ids: Collection[str]) -> None:
    """Delete the digests of running jobs, so that no later batch shares their results."""
    running = endings.lock(db, job_ids, [State.RUNNING])
    db.execute(update(JOBS).where(JOBS.c.id.in_(running)).values(digest=null()))


def renew(db: Connection, attempts: Mapping[str, int], worker: str, seconds: float) -> Renewal:
    """Prolong the leases that a worker holds (job id → attempt) by `seconds` from now."""
    kept: set[str] = set()
    for part in rows.parts(sorted(attempts)):
        mine = and_(JOBS.c.id.in_(endings.lock(db, part, [State.RUNNING])), JOBS.c.worker == worker)
        prolong = update(JOBS).where(mine).values(lease_until=clock() + seconds)
        renewed = db.execute(prolong.returning(JOBS.c.id, JOBS.c.attempt)).all()
        kept |= {row.id for row in renewed if row.attempt == attempts[row.id]}
    stopped = select(JOBS.c.id).where(JOBS.c.id.in_(kept), JOBS.c.cancelled_at.is_not(None))
    cancelled = set(db.scalars(stopped))
    rest = select(JOBS.c.id, JOBS.c.state, JOBS.c.attempt).where(JOBS.c.id.in_(attempts.keys() - kept))
    # A job that this very attempt has just finished is not lost.
    lost = {row.id for row in db.execute(rest) if not (row.state in FINAL and row.attempt == attempts[row.id])}
    return Renewal(lost, cancelled)


def expire(db: Connection, max_attempts: int, count: int) -> int:
    """Requeue up to `count` jobs whose leases have expired, or end those that have had all their attempts. Returns how
    many jobs there were."""
    # Ordered by the index's own column. Ordered by id, SQLite would walk the primary key of all jobs.
    late = select(JOBS.c.id).where(RUNNING, JOBS.c.lease_until < clock()).order_by(JOBS.c.lease_until)
    # Locked, so that no worker can renew or finish them meanwhile. A row that another transaction has locked is
    # skipped: its worker is just renewing or finishing it.
    ids = list(db.scalars(late.limit(count).with_for_update(skip_locked=True)))
    if not ids:
        return 0
    chosen, detail = JOBS.c.id.in_(ids), f"worker lost: its lease expired in the last of {max_attempts} attempts"
    endings.end(db, and_(chosen, JOBS.c.cancelled_at.is_not(None)), Verdict.CANCELLED, endings.CANCELLED_RUNNING)
    endings.end(db, and_(chosen, JOBS.c.attempt >= max_attempts), Verdict.SANDBOX_ERROR, detail)
    db.execute(update(JOBS).where(chosen, RUNNING).values(state=State.QUEUED, lease_until=null()))
    return len(ids)


def _next(which: Sequence[Any], count: int) -> Any:
    """The query for the ids of the next `count` jobs with these conditions. Each priority is queried separately,
    because only then does the index deliver the rows in order."""
    first: list[Any] = [
        select(
            select(JOBS.c.id, JOBS.c.rank)
            .where(*which, JOBS.c.priority == priority.value)
            .order_by(JOBS.c.rank)
            .limit(count)
            # PostgreSQL: skip what another transaction has locked, mostly another claim. Waiting for it would keep
            # this worker from the jobs that it can have.
            .with_for_update(skip_locked=True)
            .subquery()
        )
        for priority in Priority
    ]
    candidates = union_all(*first).subquery()
    return select(candidates.c.id).order_by(candidates.c.rank).limit(count)


def _advance(db: Connection, claimed: Sequence[Row[Any]]) -> None:
    """Move the current turn (fair share) on to the latest one that was claimed."""
    reached = max(row.rank - rows.HEAD_START[Priority(row.priority)] for row in claimed)
    # Not worth waiting for: the transaction that has locked this row may have lost its connection.
    behind = select(TURNS.c.id).where(TURNS.c.value < reached).with_for_update(skip_locked=True)
    db.execute(update(TURNS).where(TURNS.c.id.in_(behind)).values(value=reached))


def _untried(db: Connection, attempts: Mapping[str, int], holder: str, **values: Any) -> None:
    """Requeue the jobs of a holder (job id → attempt) as if they had not been claimed, and set these columns."""
    locked = endings.lock(db, attempts, [State.RUNNING])
    for attempt in set(attempts.values()):
        those = [job_id for job_id in locked if attempts[job_id] == attempt]
        mine = and_(JOBS.c.id.in_(those), JOBS.c.attempt == attempt, JOBS.c.worker == holder, RUNNING)
        db.execute(update(JOBS).where(mine).values(state=State.QUEUED, attempt=attempt - 1, **values))
    entries.end_cancelled(db, list(attempts))


def _until(shun: float) -> Any:
    return clock() + shun if shun else null()


def _unread(version: str) -> str:
    """The value of the column `worker` while a job waits for a worker of another version."""
    return f"version {version}"
