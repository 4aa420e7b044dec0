"""Identical jobs (deduplication): one of them, the leader, is run, and the others, its twins, get its result."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, and_, func, select, update

from evalpool.schemas import rows
from evalpool.schemas.tables import DIGESTED, JOBS, RESULTS, TWINS
from evalpool.schemas.verdict import FINAL, State, Verdict

MOST, APART = 1000, 200_000
"""A leader has at most so many twins at a time, and no twin that is further behind it in the batch. All twins get the
result in one transaction, for which other writers wait."""
_UNSCORED = [verdict for verdict in Verdict if not verdict.scored]


def hold(db: Connection, job_ids: Collection[str], *, read: bool = False) -> None:
    """Lock the open ones of these jobs until the transaction ends; with `read`, in share mode. A transaction that ends
    a leader also locks its twins. To avoid deadlocks, a twin is therefore locked only together with its leaders."""
    while job_ids:
        family = _family(db, job_ids)
        unlocked = db.begin_nested()
        which = (JOBS.c.id.in_(family), JOBS.c.state.not_in(FINAL))
        db.execute(select(JOBS.c.id).where(*which).order_by(JOBS.c.id).with_for_update(read=read))
        if _family(db, job_ids) <= family:
            unlocked.commit()
            return
        unlocked.rollback()  # a twin got another leader meanwhile, which must be locked with it: start again


def _family(db: Connection, job_ids: Collection[str]) -> set[str]:
    """These jobs, their leaders, the leaders of those, and so on."""
    found, new = set[str](), set(job_ids)
    while new:
        found |= new
        new = set(db.scalars(select(JOBS.c.twin_of).where(TWINS, JOBS.c.id.in_(new)))) - found
    return found


def of(leaders: Collection[str]) -> Any:
    """The SQL condition for twins of these leaders that still wait for their result."""
    return and_(TWINS, JOBS.c.twin_of.in_(leaders))


def promote(db: Connection, leader: str) -> None:
    """Queue the first twin of a leader whose result says nothing about the program. The other twins wait for that twin
    from now on."""
    heir = db.scalar(select(func.min(JOBS.c.id)).where(of([leader])))
    if heir is not None:
        db.execute(update(JOBS).where(JOBS.c.id == heir).values(state=State.QUEUED, twin_of=None))
        db.execute(update(JOBS).where(of([leader])).values(twin_of=heir))


def known(db: Connection, digests: Sequence[str]) -> dict[str, str]:
    """Digest → id of the latest job with this digest that was run and got a scored verdict."""
    ran = (
        select(JOBS.c.digest, RESULTS.c.job_id)
        .join(RESULTS, RESULTS.c.job_id == JOBS.c.id)
        .where(DIGESTED, JOBS.c.digest.in_(digests))
        .where(RESULTS.c.verdict.not_in(_UNSCORED), RESULTS.c.shared_with.is_(None))
        .order_by(RESULTS.c.finished_at)
    )
    return {row.digest: row.job_id for row in db.execute(ran)}


def find_leaders(batch_id: str, start: int, digests: Sequence[str], seen: dict[str, str]) -> dict[int, str]:
    """Place in the batch → id of the leader, for those of these jobs, the batch's `start`-th and following, whose
    digest has been seen before. `seen` (digest → job id) is updated with the others. If too many jobs wait for a leader
    already, the next one becomes a leader itself."""
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
