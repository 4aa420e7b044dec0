"""The audit of the rows for `evalpool db check`: finds rows that contradict each other, and repairs them.

The store never leaves such rows behind, but older versions, a crash of the database or manual SQL can.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, and_, delete, func, insert, null, or_, select, text, update

from evalpool.schemas import endings, rows
from evalpool.schemas.store import Store
from evalpool.schemas.tables import JOBS, RESULTS, TALLIES, TWINS
from evalpool.schemas.verdict import FINAL, TWIN, State, Verdict

_leaders = JOBS.alias("leaders")


@dataclass(frozen=True)
class Finding:
    """Rows with one kind of inconsistency."""

    what: str
    """What is wrong, as a clause about the jobs or batches."""
    remedy: str
    """What the repair does, as a clause."""
    ids: Sequence[str]
    """The ids of the jobs or batches that are affected."""


def audit(store: Store, *, repair: bool) -> list[Finding]:
    """Return a finding for each kind of inconsistency that exists. With `repair`, the rows are repaired."""
    found = []
    for kind in _KINDS:
        with store.database.read() as db:
            ids = kind.find(db)
        if ids:
            found.append(Finding(kind.what, kind.remedy, ids))
        for part in rows.parts(ids) if repair else ():
            with store.database.write() as db:
                kind.repair(db, part)
    return found


def _without_result(db: Connection) -> list[str]:
    missing = select(JOBS.c.id).outerjoin(RESULTS, RESULTS.c.job_id == JOBS.c.id)
    return list(db.scalars(missing.where(JOBS.c.state.in_(FINAL), RESULTS.c.job_id.is_(None)).order_by(JOBS.c.id)))


def _run_again(db: Connection, ids: Sequence[str]) -> None:
    ended = and_(JOBS.c.id.in_(ids), JOBS.c.state.in_(FINAL))
    again = {"state": State.QUEUED, "attempt": 0, "worker": null(), "lease_until": null(), "twin_of": null()}
    db.execute(update(JOBS).where(ended).values(**again))
    stopped = and_(JOBS.c.id.in_(ids), JOBS.c.cancelled_at.is_not(None))
    endings.end(db, stopped, Verdict.CANCELLED, endings.CANCELLED_WAITING)


def _with_result(db: Connection) -> list[str]:
    both = select(JOBS.c.id).join(RESULTS, RESULTS.c.job_id == JOBS.c.id)
    cancelled = RESULTS.c.verdict == Verdict.CANCELLED
    right = or_(and_(JOBS.c.state == State.CANCELLED, cancelled), and_(JOBS.c.state == State.FINISHED, ~cancelled))
    return list(db.scalars(both.where(~right).order_by(JOBS.c.id)))


def _end(db: Connection, ids: Sequence[str]) -> None:
    given = select(RESULTS.c.job_id, RESULTS.c.verdict).where(RESULTS.c.job_id.in_(ids))
    for job_id, verdict in db.execute(given).all():
        final = {"state": State.after(Verdict(verdict)), "lease_until": null()}
        db.execute(update(JOBS).where(JOBS.c.id == job_id).values(**final))
    endings.share(db, ids)


def _forgotten_twins(db: Connection) -> list[str]:
    pair = select(JOBS.c.id).outerjoin(_leaders, _leaders.c.id == JOBS.c.twin_of)
    over = or_(_leaders.c.id.is_(None), _leaders.c.state.in_(FINAL))
    return list(db.scalars(pair.where(TWINS, over).order_by(JOBS.c.id)))


def _serve(db: Connection, ids: Sequence[str]) -> None:
    which = and_(JOBS.c.id.in_(ids), JOBS.c.state == TWIN)
    endings.share(db, set(db.scalars(select(JOBS.c.twin_of).where(which))))
    there = select(_leaders.c.id).where(_leaders.c.id == JOBS.c.twin_of).exists()
    db.execute(update(JOBS).where(which, ~there).values(state=State.QUEUED, twin_of=null()))


def _miscounted(db: Connection) -> list[str]:
    by = (TALLIES.c.batch_id, TALLIES.c.verdict)
    counted = select(*by, func.sum(TALLIES.c.count)).group_by(*by)
    of = (RESULTS.c.batch_id, RESULTS.c.verdict)
    real = select(*of, func.count()).group_by(*of)
    tallies = Counter({(batch_id, verdict): int(count) for batch_id, verdict, count in db.execute(counted)})
    results = Counter({(batch_id, verdict): int(count) for batch_id, verdict, count in db.execute(real)})
    return sorted({key[0] for key in tallies.keys() | results.keys() if tallies[key] != results[key]})


def _recount(db: Connection, ids: Sequence[str]) -> None:
    db.execute(delete(TALLIES).where(TALLIES.c.batch_id.in_(ids)))
    real = select(RESULTS.c.batch_id, RESULTS.c.verdict, text("''"), func.count()).where(RESULTS.c.batch_id.in_(ids))
    grouped = real.group_by(RESULTS.c.batch_id, RESULTS.c.verdict)
    db.execute(insert(TALLIES).from_select(["batch_id", "verdict", "writer", "count"], grouped))


class _Kind(NamedTuple):
    """One kind of inconsistency."""

    what: str
    remedy: str
    find: Callable[[Connection], list[str]]
    repair: Callable[[Connection, Sequence[str]], None]


_KINDS = (
    _Kind("jobs have ended without a result", "they are run again", _without_result, _run_again),
    _Kind("jobs have a result, but not the state that goes with it", "they get that state", _with_result, _end),
    _Kind(
        "jobs wait for a job that has ended or is missing",
        "they get its result, or are queued",
        _forgotten_twins,
        _serve,
    ),
    _Kind("batches have wrong counts", "they are counted again", _miscounted, _recount),
)
