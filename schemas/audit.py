"""Finds and repairs rows that contradict each other, for `evalpool db check`.

Our own statements never leave such rows. Older versions, a crash of the database or manual SQL can.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, null, or_, select, text, update
from sqlmodel import SQLModel

from schemas import endings, rows
from schemas.store import Store
from schemas.tables import FINAL_STATE, TWIN
from schemas.verdict import State, Verdict

_jobs = SQLModel.metadata.tables["jobs"]
_results = SQLModel.metadata.tables["results"]
_tallies = SQLModel.metadata.tables["tallies"]
_leaders = _jobs.alias("leaders")

FINAL = (State.FINISHED, State.CANCELLED)


@dataclass(frozen=True)
class Finding:
    """One kind of inconsistency."""

    what: str
    """What is wrong, in words."""
    remedy: str
    """What the repair does."""
    ids: Sequence[str]
    """The jobs or batches that are affected."""


def audit(store: Store, *, repair: bool) -> list[Finding]:
    """Every kind of inconsistency that was found. With `repair`, they are repaired."""
    found = []
    for what, remedy, look, mend in _KINDS:
        with store.database.read() as db:
            ids = look(db)
        if ids:
            found.append(Finding(what, remedy, ids))
        for part in rows.parts(ids) if repair else ():
            with store.database.write() as db:
                mend(db, part)
    return found


def _without_result(db: Connection) -> list[str]:
    missing = select(_jobs.c.id).outerjoin(_results, _results.c.job_id == _jobs.c.id)
    return list(db.scalars(missing.where(_jobs.c.state.in_(FINAL), _results.c.job_id.is_(None)).order_by(_jobs.c.id)))


def _run_again(db: Connection, ids: Sequence[str]) -> None:
    ended = and_(_jobs.c.id.in_(ids), _jobs.c.state.in_(FINAL))
    again = {"state": State.QUEUED, "attempt": 0, "worker": null(), "lease_until": null(), "twin_of": null()}
    db.execute(update(_jobs).where(ended).values(**again))
    stopped = and_(_jobs.c.id.in_(ids), _jobs.c.cancelled_at.is_not(None))
    endings.end(db, stopped, Verdict.CANCELLED, "cancelled before it ran")


def _with_result(db: Connection) -> list[str]:
    both = select(_jobs.c.id).join(_results, _results.c.job_id == _jobs.c.id)
    cancelled = _results.c.verdict == Verdict.CANCELLED
    right = or_(and_(_jobs.c.state == State.CANCELLED, cancelled), and_(_jobs.c.state == State.FINISHED, ~cancelled))
    return list(db.scalars(both.where(~right).order_by(_jobs.c.id)))


def _end(db: Connection, ids: Sequence[str]) -> None:
    given = select(_results.c.job_id, _results.c.verdict).where(_results.c.job_id.in_(ids))
    for job_id, verdict in db.execute(given).all():
        final = {"state": FINAL_STATE[Verdict(verdict)], "lease_until": null()}
        db.execute(update(_jobs).where(_jobs.c.id == job_id).values(**final))
    endings.share(db, ids)


def _forgotten_twins(db: Connection) -> list[str]:
    pair = select(_jobs.c.id).outerjoin(_leaders, _leaders.c.id == _jobs.c.twin_of)
    over = or_(_leaders.c.id.is_(None), _leaders.c.state.in_(FINAL))
    return list(db.scalars(pair.where(text("jobs.state = 'twin'"), over).order_by(_jobs.c.id)))


def _serve(db: Connection, ids: Sequence[str]) -> None:
    which = and_(_jobs.c.id.in_(ids), _jobs.c.state == TWIN)
    endings.share(db, set(db.scalars(select(_jobs.c.twin_of).where(which))))
    there = select(_leaders.c.id).where(_leaders.c.id == _jobs.c.twin_of).exists()
    db.execute(update(_jobs).where(which, ~there).values(state=State.QUEUED, twin_of=null()))


def _miscounted(db: Connection) -> list[str]:
    by = (_tallies.c.batch_id, _tallies.c.verdict)
    counted = select(*by, func.sum(_tallies.c.count)).group_by(*by)
    of = (_results.c.batch_id, _results.c.verdict)
    real = select(*of, func.count()).group_by(*of)
    said = {(batch_id, verdict): int(count) for batch_id, verdict, count in db.execute(counted)}
    true = {(batch_id, verdict): int(count) for batch_id, verdict, count in db.execute(real)}
    return sorted(
        {
            batch_id
            for batch_id, verdict in said.keys() | true.keys()
            if said.get((batch_id, verdict), 0) != true.get((batch_id, verdict), 0)
        }
    )


def _recount(db: Connection, ids: Sequence[str]) -> None:
    db.execute(delete(_tallies).where(_tallies.c.batch_id.in_(ids)))
    real = select(_results.c.batch_id, _results.c.verdict, text("''"), func.count()).where(_results.c.batch_id.in_(ids))
    grouped = real.group_by(_results.c.batch_id, _results.c.verdict)
    db.execute(insert(_tallies).from_select(["batch_id", "verdict", "writer", "count"], grouped))


_Kind = tuple[str, str, Callable[[Connection], list[str]], Callable[[Connection, Sequence[str]], Any]]
_KINDS: tuple[_Kind, ...] = (
    ("jobs have ended without a result", "they are run again", _without_result, _run_again),
    ("jobs have a result, but not the state that goes with it", "they get that state", _with_result, _end),
    ("jobs wait for a job that has ended or is missing", "they get its result, or run", _forgotten_twins, _serve),
    ("batches have wrong counts", "they are counted again", _miscounted, _recount),
)
