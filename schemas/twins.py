"""Identical jobs: one of them, the leader, is run, and the others, its twins, get its result."""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, and_, insert, select, text, update
from sqlmodel import SQLModel

from schemas import rows
from schemas.database import clock
from schemas.verdict import State, Verdict

_jobs = SQLModel.metadata.tables["jobs"]
_results = SQLModel.metadata.tables["results"]
_cases = SQLModel.metadata.tables["cases"]
_TWINS = text("jobs.state = 'twin'")  # spelt out: only then do partial indexes apply
_UNSCORED = [verdict for verdict in Verdict if not verdict.scored]


def hold(db: Connection, leaders: Collection[str]) -> None:
    """Keep these jobs from being finished until the transaction ends: a twin that is added meanwhile must be seen by
    whoever finishes them, or must see that they are finished."""
    db.execute(select(_jobs.c.id).where(_jobs.c.id.in_(leaders)).order_by(_jobs.c.id).with_for_update(read=True))


def share(db: Connection, leaders: Collection[str]) -> set[str]:
    """Give the twins of those that have a verdict their results, and put the twins of those that have failed by our own
    fault, or were cancelled, into the queue. Which got one."""
    given = select(_results.c.job_id, _results.c.verdict).where(
        _results.c.job_id.in_(select(_jobs.c.twin_of).where(_TWINS, _jobs.c.twin_of.in_(leaders)))
    )
    verdicts = {row.job_id: Verdict(row.verdict) for row in db.execute(given)}
    scored = [leader for leader, verdict in verdicts.items() if verdict.scored]
    served: set[str] = set()
    if scored:
        chosen = and_(_TWINS, _jobs.c.twin_of.in_(scored))
        own = {"job_id": _jobs.c.id, "batch_id": _jobs.c.batch_id, "finished_at": clock()}
        _copy(db, _results, chosen, **own, shared_with=_results.c.job_id)
        _copy(db, _cases, chosen, job_id=_jobs.c.id)
        served.update(db.scalars(update(_jobs).where(chosen).values(state=State.FINISHED).returning(_jobs.c.id)))
    if len(scored) < len(verdicts):
        failed = and_(_TWINS, _jobs.c.twin_of.in_(verdicts.keys() - set(scored)))
        db.execute(update(_jobs).where(failed).values(state=State.QUEUED, twin_of=None))
    return served


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
    Those that have not are seen from now on."""
    found: dict[int, str] = {}
    for seq, digest in enumerate(digests, start):
        leader = seen.setdefault(digest, rows.job_id(batch_id, seq))
        if leader != rows.job_id(batch_id, seq):
            found[seq] = leader
    return found


def _copy(db: Connection, table: Any, twins: Any, **own: Any) -> None:
    """The rows of their leaders, once more for each of these twins."""
    columns = {column.name: own.get(column.name, column) for column in table.c}
    copies = select(*columns.values()).where(twins, table.c.job_id == _jobs.c.twin_of)
    db.execute(insert(table).from_select(list(columns), copies))
