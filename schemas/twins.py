"""Identical jobs: one of them, the leader, is run, and the others, its twins, get its result."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, and_, func, select, text, update
from sqlmodel import SQLModel

from schemas import rows
from schemas.verdict import State, Verdict

_jobs = SQLModel.metadata.tables["jobs"]
_results = SQLModel.metadata.tables["results"]
TWINS = text("jobs.state = 'twin'")  # spelt out: only then do partial indexes apply
MOST, APART = 1000, 200_000
"""At most so many twins of a leader are stored at a time, and none so many places after it. All twins get the result in
one transaction, for which other writers wait."""
_UNSCORED = [verdict for verdict in Verdict if not verdict.scored]


def hold(db: Connection, job_ids: Collection[str], *, read: bool = False) -> None:
    """Lock the open ones of these jobs until the transaction ends; with `read`, in share mode. A transaction that ends
    a leader also locks its twins. To avoid deadlocks, a twin is therefore locked only together with its leaders."""
    while job_ids:
        family = _family(db, job_ids)
        unlocked = db.begin_nested()
        which = (_jobs.c.id.in_(family), _jobs.c.state.not_in([State.FINISHED, State.CANCELLED]))
        db.execute(select(_jobs.c.id).where(*which).order_by(_jobs.c.id).with_for_update(read=read))
        if _family(db, job_ids) <= family:
            unlocked.commit()
            return
        unlocked.rollback()  # A twin got another leader meanwhile, which must be locked with it: start again.


def _family(db: Connection, job_ids: Collection[str]) -> set[str]:
    """These jobs, their leaders, the leaders of those, and so on."""
    found, new = set[str](), set(job_ids)
    while new:
        found |= new
        new = set(db.scalars(select(_jobs.c.twin_of).where(TWINS, _jobs.c.id.in_(new)))) - found
    return found


def of(leaders: Collection[str]) -> Any:
    """The SQL condition for twins of these leaders that still wait for their result."""
    return and_(TWINS, _jobs.c.twin_of.in_(leaders))


def promote(db: Connection, leader: str) -> None:
    """Queue the first twin of a leader whose result says nothing about the program. The other twins wait for that
    one."""
    heir = db.scalar(select(func.min(_jobs.c.id)).where(of([leader])))
    if heir is not None:
        db.execute(update(_jobs).where(_jobs.c.id == heir).values(state=State.QUEUED, twin_of=None))
        db.execute(update(_jobs).where(of([leader])).values(twin_of=heir))


def known(db: Connection, digests: Sequence[str]) -> dict[str, str]:
    """Jobs that were run and got a verdict, by the digest they share with these; the latest of each."""
    ran = (
        select(_jobs.c.digest, _results.c.job_id)
        .join(_results, _results.c.job_id == _jobs.c.id)
        .where(text("jobs.digest IS NOT NULL"), _jobs.c.digest.in_(digests))
        .where(_results.c.verdict.not_in(_UNSCORED), _results.c.shared_with.is_(None))
        .order_by(_results.c.finished_at)
    )
    return {row.digest: row.job_id for row in db.execute(ran)}


def leaders(batch_id: str, start: int, digests: Sequence[str], seen: dict[str, str]) -> dict[int, str]:
    """Which of these jobs, the batch's `start`-th and following, have been seen before: place in the batch → job id.
    Those that have not are seen from now on. If too many wait for a leader already, the next one leads instead."""
    found: dict[int, str] = {}
    waiting: Counter[str] = Counter()
    for seq, digest in enumerate(digests, start):
        own = rows.job_id(batch_id, seq)
        leader = seen.setdefault(digest, own)
        if leader == own:
            continue
        waiting[leader] += 1
        here, _, place = leader.rpartition("-")
        if here == batch_id and (waiting[leader] > MOST or seq - int(place) > APART):
            seen[digest] = own
        else:
            found[seq] = leader
    return found
