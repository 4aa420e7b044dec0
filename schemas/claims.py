"""How workers claim jobs, renew their leases and give jobs back. Each query runs in the transaction of its caller."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from sqlalchemy import Connection, Row, and_, exists, not_, null, or_, select, union_all, update

from evalpool.schemas import endings, entries, rows
from evalpool.schemas.base import first_problem
from evalpool.schemas.database import clock
from evalpool.schemas.job import JobSpec
from evalpool.schemas.lease import Claim, Lease, Renewal
from evalpool.schemas.statements import Statement, among, given, number, one_of, seconds
from evalpool.schemas.tables import JOBS, QUEUED, RUNNING, TURNS
from evalpool.schemas.verdict import FINAL, Priority, State, Verdict

UNREADABLE_SECONDS = 3600.0
"""How long workers of a version that cannot read a job leave it to other versions."""


class Claimed(NamedTuple):
    """The rows of jobs that were just claimed."""

    rows: Sequence[Row[Any]]
    passed_over: bool
    """Whether fewer jobs than asked for were found while others were locked by another transaction."""


class Pending(NamedTuple):
    """What there is to do for a worker, as far as one cheap query can tell."""

    waiting: bool
    """Whether jobs of its fleet are queued."""
    expired: bool
    """Whether leases have expired, of whatever fleet."""
    interrupted: bool
    """Whether the queueing or cancelling of a batch has been under way for long, so that it may be interrupted."""


class Holding(NamedTuple):
    """What the rows say about the leases that a worker believes to hold."""

    renewal: Renewal
    due: list[str]
    """Ids of the jobs whose leases are to be prolonged now."""


def _claimable(postgres: bool) -> list[Any]:
    """The conditions for the jobs that a worker may claim."""
    not_ours = and_(JOBS.c.worker != given("holder"), JOBS.c.worker != given("unread"))
    free = or_(JOBS.c.lease_until.is_(None), not_ours, JOBS.c.lease_until < clock())
    here = or_(JOBS.c.image.is_(None), not_(among(JOBS.c.image, "without", postgres)))
    return [QUEUED, JOBS.c.fleet == given("of_fleet"), JOBS.c.cancelled_at.is_(None), free, here]


def _claiming(postgres: bool) -> Any:
    return (
        update(JOBS)
        .where(JOBS.c.id.in_(_next(_claimable(postgres))))
        .values(
            state=State.RUNNING.value, attempt=JOBS.c.attempt + 1, worker=given("holder"),
            lease_until=clock() + seconds("lasting"), started_at=clock(),
        )
        .returning(
            JOBS.c.id, JOBS.c.batch_id, JOBS.c.spec, JOBS.c.attempt, JOBS.c.created_at, JOBS.c.started_at,
            JOBS.c.rank, JOBS.c.priority, JOBS.c.failures, JOBS.c.image, JOBS.c.digest,
        )
    )  # fmt: skip


def _advancing(_postgres: bool) -> Any:
    # Not worth waiting for: the transaction that has locked this row may have lost its connection.
    behind = select(TURNS.c.id).where(TURNS.c.value < seconds("reached")).with_for_update(skip_locked=True)
    return update(TURNS).where(TURNS.c.id.in_(behind)).values(value=seconds("reached"))


_claim = Statement(_claiming)
_any_left = Statement(lambda postgres: select(select(JOBS.c.id).where(*_claimable(postgres)).exists()))
_advance = Statement(_advancing)


def _asking(_postgres: bool) -> Any:
    # Each priority by itself, so that the index of the queue is used.
    waiting = or_(
        *(
            exists().where(QUEUED, JOBS.c.fleet == given("of_fleet"), one_of(JOBS.c.priority, [priority]))
            for priority in Priority
        )
    )
    expired = exists().where(RUNNING, JOBS.c.lease_until < clock())
    return select(waiting, expired, entries.interrupted(seconds("since")).exists())


_ask = Statement(_asking)


def pending(db: Connection, fleet: str, since: float) -> Pending:
    """What there is to do for a worker of a fleet. A batch is interrupted if its queueing or cancelling was begun more
    than `since` seconds ago."""
    return Pending(*map(bool, _ask.run(db, of_fleet=fleet, since=since).one()))


def claim(
    db: Connection, count: int, worker: str, lasting: float, *, fleet: str, version: str, without: Collection[str]
) -> Claimed:
    """Claim up to `count` queued jobs of a fleet in the order of their turns, except those with an image in `without`.
    Each claim is one more attempt."""
    which = {"holder": worker, "unread": _unread(version), "of_fleet": fleet, "without": list(without)}
    claimed = _claim.run(db, **which, most=count, lasting=lasting)
    locks = db.dialect.name == "postgresql" and len(claimed) < count
    passed_over = locks and bool(_any_left.run(db, **which).scalar())
    if claimed and not fleet:  # a private run has one batch, which waits for nobody's turn
        _advance.run(db, reached=max(row.rank - rows.HEAD_START[Priority(row.priority)] for row in claimed))
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


def _holding(postgres: bool) -> Any:
    """The jobs that a worker believes to hold, and whether their leases are to be prolonged now."""
    # A lease that lasts too long was given before the clock of the database was set back.
    left = or_(JOBS.c.lease_until < clock() + seconds("enough"), JOBS.c.lease_until > clock() + seconds("lasting"))
    due = and_(RUNNING, JOBS.c.worker == given("holder"), left)
    return select(JOBS.c.id, JOBS.c.state, JOBS.c.worker, JOBS.c.attempt, JOBS.c.cancelled_at, due.label("due")).where(
        among(JOBS.c.id, "ids", postgres)
    )


def _prolonging(postgres: bool) -> Any:
    mine = and_(among(JOBS.c.id, "ids", postgres), RUNNING, JOBS.c.worker == given("holder"))
    locked = select(JOBS.c.id).where(mine).order_by(JOBS.c.id).with_for_update()  # in the same order as `endings.lock`
    return update(JOBS).where(JOBS.c.id.in_(locked)).values(lease_until=clock() + seconds("lasting"))


_hold = Statement(_holding)
_prolong = Statement(_prolonging)


def held(db: Connection, attempts: Mapping[str, int], worker: str, lasting: float) -> Holding:
    """What the rows say about the leases that a worker believes to hold (job id → attempt). Leases that have used up a
    third of their time are due to be prolonged: the others would only cost a write, and most jobs end before."""
    which = {"ids": list(attempts), "holder": worker, "enough": lasting * 2 / 3, "lasting": lasting}
    found = {row.id: row for row in _hold.run(db, **which)}
    mine = {
        row.id for row in found.values()
        if row.state == State.RUNNING and row.worker == worker and row.attempt == attempts[row.id]
    }  # fmt: skip
    # A job that this very attempt has just finished is not lost.
    over = {row.id for row in found.values() if row.state in FINAL and row.attempt == attempts[row.id]}
    cancelled = {job_id for job_id in mine if found[job_id].cancelled_at is not None}
    due = sorted(job_id for job_id in mine if found[job_id].due)
    return Holding(Renewal(found.keys() - mine - over, cancelled), due)


def prolong(db: Connection, job_ids: Sequence[str], worker: str, lasting: float) -> None:
    """Prolong those of these leases that the worker still holds by `lasting` seconds from now."""
    _prolong.run(db, ids=list(job_ids), holder=worker, lasting=lasting)


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


def _next(which: Sequence[Any]) -> Any:
    """The query for the ids of the next `most` jobs with these conditions. Each priority is queried separately,
    because only then does the index deliver the rows in order."""
    first: list[Any] = [
        select(
            select(JOBS.c.id, JOBS.c.rank)
            .where(*which, one_of(JOBS.c.priority, [priority]))
            .order_by(JOBS.c.rank)
            .limit(number("most"))
            # PostgreSQL: skip what another transaction has locked, mostly another claim. Waiting for it would keep
            # this worker from the jobs that it can have.
            .with_for_update(skip_locked=True)
            .subquery()
        )
        for priority in Priority
    ]
    candidates = union_all(*first).subquery()
    return select(candidates.c.id).order_by(candidates.c.rank).limit(number("most"))


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
