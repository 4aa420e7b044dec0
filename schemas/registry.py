"""The registry of workers, from their heartbeats, and the messages that no worker could read (dead letters). Each query
runs in the transaction of its caller."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, insert, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from evalpool.schemas.database import clock
from evalpool.schemas.fleet import Member
from evalpool.schemas.statements import Statement, given
from evalpool.schemas.tables import LETTERS, WORKERS

FORGOTTEN_SECONDS = 3600
"""Rows of workers are deleted after so many seconds without a heartbeat."""
LETTERS_KEPT = 1000
"""How many dead letters are kept; older ones are deleted."""


def _reporting(postgres: bool) -> Any:
    add: Any = (postgresql if postgres else sqlite).insert(WORKERS)
    add = add.values(name=given("member"), seen_at=clock(), about=given("said"))
    new = {"seen_at": add.excluded.seen_at, "about": add.excluded.about}
    return add.on_conflict_do_update(index_elements=["name"], set_=new)


_report = Statement(_reporting)


def report(db: Connection, member: Member) -> None:
    """Store the heartbeat of a worker, with what it reports about itself."""
    _report.run(db, member=member.name, said=member.model_dump_json())


def retire(db: Connection, name: str) -> None:
    """Delete the row of a worker that has ended, and the rows of forgotten workers."""
    gone = or_(WORKERS.c.name == name, WORKERS.c.seen_at < clock() - FORGOTTEN_SECONDS)
    db.execute(delete(WORKERS).where(gone))


def members(db: Connection, seconds: float) -> tuple[Member, ...]:
    """The workers whose last heartbeat is at most so many seconds old, by name."""
    alive = select(WORKERS.c.about).where(WORKERS.c.seen_at > clock() - seconds).order_by(WORKERS.c.name)
    return tuple(Member.model_validate_json(about) for about in db.scalars(alive))


def last_seen(db: Connection, fleet: str) -> float | None:
    """Seconds since the latest heartbeat of any worker of a fleet; `None` if no worker is known."""
    seen = select(WORKERS.c.about, clock() - WORKERS.c.seen_at).order_by(WORKERS.c.seen_at.desc())
    ages = (age for about, age in db.execute(seen) if Member.model_validate_json(about).fleet == fleet)
    return next(ages, None)


def slots(db: Connection, names: Sequence[str]) -> dict[str, int]:
    """Name → slots, for those of these workers whose heartbeat tells their slots."""
    if not names:
        return {}
    query = select(WORKERS.c.name, WORKERS.c.about).where(WORKERS.c.name.in_(names))
    known = {name: Member.model_validate_json(about).slots for name, about in db.execute(query)}
    return {name: count for name, count in known.items() if count is not None}


def bury(db: Connection, worker: str, reason: str, body: str) -> None:
    """Keep a dead letter. If there are too many, the oldest are deleted."""
    db.execute(insert(LETTERS).values(worker=worker, reason=reason, body=body, arrived_at=clock()))
    latest = select(func.max(LETTERS.c.id)).scalar_subquery()
    db.execute(delete(LETTERS).where(LETTERS.c.id <= latest - LETTERS_KEPT))


def letters(db: Connection) -> int:
    """How many dead letters are kept."""
    return db.scalar(select(func.count()).select_from(LETTERS)) or 0
