"""How the rows of batches and jobs are added, and how jobs are cancelled: the steps of the store that several of its
queries share. Each runs in the transaction of its caller."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, func, select, text, update
from sqlmodel import SQLModel

from schemas import endings, twins
from schemas.database import clock, insert_many, upsert
from schemas.job import JobSpec
from schemas.tables import FILLING, TWIN
from schemas.verdict import State, Verdict

_jobs = SQLModel.metadata.tables["jobs"]
_batches = SQLModel.metadata.tables["batches"]
_QUEUED = text("jobs.state = 'queued'")  # spelt out: only then do partial indexes apply


def filling(specs: Sequence[JobSpec]) -> str:
    """The value of the column `todo` while these jobs, and no others, are being stored."""
    made = hashlib.sha256()
    for spec in specs:
        made.update(spec.model_dump_json(exclude_defaults=True).encode() + b"\n")
    return f"{FILLING} {made.hexdigest()[:32]}"


def open_batch(
    db: Connection,
    batch_id: str,
    total: int,
    name: str | None,
    key: str | None,
    about: Mapping[str, Any],
    todo: str | None = None,
    pins: Mapping[str, str] | None = None,
) -> tuple[str, int]:
    """The row of a batch, or the one that has this key; its id, and how many jobs it has by now."""
    batch = {
        "id": batch_id, "name": name, "idempotency_key": key, "total": total, "about": json.dumps(about), "todo": todo,
        "pins": json.dumps(pins) if pins else None, "created_at": db.scalar(select(clock())),
    }  # fmt: skip
    if db.execute(upsert(db, _batches).on_conflict_do_nothing().returning(_batches.c.id), [batch]).all():
        return batch_id, 0
    stored = str(db.scalar(select(_batches.c.id).where(_batches.c.idempotency_key == key)))
    last = db.scalar(select(func.max(_jobs.c.seq)).where(_jobs.c.batch_id == stored))
    return stored, 0 if last is None else last + 1


def add(
    db: Connection,
    added: Sequence[dict[str, Any]],
    digests: Sequence[str] | None,
    leaders: Mapping[int, str],
    images: Sequence[str] | None,
    state: str = State.QUEUED,
) -> set[str]:
    """Add the rows of some jobs of one batch. Existing rows stay as they are: a second process may resume a submission
    while the first one still runs. If the batch was cancelled meanwhile, the jobs end at once. Returns the jobs that
    got the result of their leader."""
    if not added:
        return set()
    batch = select(_batches.c.cancelled_at, clock()).where(_batches.c.id == added[0]["batch_id"])
    cancelled_at, now = db.execute(batch.with_for_update(read=True)).one()
    if cancelled_at is not None:
        leaders = {}
    # The leaders are locked, so that none of them can end unnoticed while its twins are being added.
    waited_for = set(leaders.values())
    twins.hold(db, waited_for, read=True)
    for place, row in enumerate(added):
        leader = leaders.get(row["seq"])
        row |= {"created_at": now, "twin_of": leader, "state": TWIN if leader else state}
        row |= {"digest": digests and digests[place], "image": images and images[place]}
    insert_many(db, upsert(db, _jobs).on_conflict_do_nothing(), added)
    if cancelled_at is not None:
        cancel(db, [row["id"] for row in added])
    return endings.share(db, waited_for)


def cancel(db: Connection, job_ids: Sequence[str]) -> int:
    """End the waiting jobs, and mark the running ones so that their workers stop them. Returns how many ended."""
    twins.hold(db, job_ids)
    which = and_(_jobs.c.id.in_(job_ids), _jobs.c.state.in_(endings.OPEN))
    db.execute(update(_jobs).where(which).values(cancelled_at=clock()))
    waiting = and_(_jobs.c.id.in_(job_ids), _jobs.c.state.in_(endings.WAITING))
    return len(endings.end(db, waiting, Verdict.CANCELLED, "cancelled before it ran"))


def end_cancelled(db: Connection, job_ids: Sequence[str]) -> None:
    """End those of these jobs that were requeued after their cancellation."""
    which = and_(_jobs.c.id.in_(job_ids), _QUEUED, _jobs.c.cancelled_at.is_not(None))
    endings.end(db, which, Verdict.CANCELLED, "cancelled before it ran")
