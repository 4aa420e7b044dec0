"""How batches and their jobs enter the queue, and how they are taken out of it again (cancelled). Each query runs in
the transaction of its caller.

The jobs of a large batch are stored in several transactions. The column `todo` of the batch says what is left to do, so
that a worker can finish what a process began that has died.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, func, null, select, update
from sqlalchemy.dialects import postgresql, sqlite

from evalpool.schemas import dedup, endings, rows
from evalpool.schemas.database import clock
from evalpool.schemas.job import JobSpec
from evalpool.schemas.statements import Insertion, Statement, given, number, one_of
from evalpool.schemas.tables import BATCHES, JOBS, QUEUED, TURNS, UNFINISHED, Todo, span
from evalpool.schemas.verdict import HELD, OPEN, TWIN, WAITING, State, Verdict


class Opening(NamedTuple):
    """A batch that was opened, or opened again."""

    batch_id: str
    stored: int
    """How many of its jobs are stored already."""
    turn: float
    """The current turn (fair share), at which a submission starts."""


class Single(NamedTuple):
    """A job that is submitted alone, in a batch of its own."""

    batch_id: str
    spec: JobSpec
    image: str


class Plan(NamedTuple):
    """What the row of a batch says about its submission."""

    todo: str
    """The value of the column `todo`; empty if nothing is left to do."""
    pins: dict[str, str]
    """Name of an image → digest that it had when the submission began."""

    @property
    def filling(self) -> bool:
        """Whether the jobs are still being stored."""
        return self.todo.startswith(Todo.FILLING)


class Step(NamedTuple):
    """One of the transactions that queue or cancel a large batch."""

    todo: Todo
    start: int
    """The place in the batch at which the jobs of this step begin. The last step has -1 and marks the batch as done."""


def filling(specs: Sequence[JobSpec]) -> str:
    """The value of the column `todo` while these jobs, and no others, are being stored."""
    jobs = hashlib.sha256()
    for spec in specs:
        jobs.update(spec.model_dump_json(exclude_defaults=True).encode() + b"\n")
    return f"{Todo.FILLING} {jobs.hexdigest()[:32]}"


def _opening(postgres: bool) -> Any:
    batch = {
        "id": given("new_id"), "name": given("new_name"), "idempotency_key": given("new_key"), "total": number("jobs"),
        "about": given("new_about"), "todo": given("new_todo"), "pins": given("new_pins"), "created_at": clock(),
    }  # fmt: skip
    add: Any = (postgresql if postgres else sqlite).insert(BATCHES)
    # Only for the key: another batch with this id would be an error.
    return add.values(batch).on_conflict_do_nothing(index_elements=["idempotency_key"]).returning(BATCHES.c.id)


_open = Statement(_opening)
_turn = Statement(lambda _postgres: select(func.max(TURNS.c.value)))
_cancelled = Statement(
    lambda _postgres: (
        select(BATCHES.c.cancelled_at, clock()).where(BATCHES.c.id == given("of_batch")).with_for_update(read=True)
    )
)
_now = Statement(lambda _postgres: select(clock(), select(func.max(TURNS.c.value)).scalar_subquery()))
_add = Insertion(JOBS, rows.JOB_COLUMNS)
_add_batches = Insertion(BATCHES, ["id", "total", "about", "created_at"])


def open_batch(
    db: Connection,
    batch_id: str,
    total: int,
    name: str | None,
    key: str | None,
    about: Mapping[str, Any],
    todo: str | None = None,
    pins: Mapping[str, str] | None = None,
) -> Opening:
    """Store the row of a batch. A batch that has this idempotency key already stays as it is, and is opened instead."""
    new = _open.run(
        db, new_id=batch_id, new_name=name, new_key=key, jobs=total, new_about=json.dumps(about), new_todo=todo,
        new_pins=json.dumps(pins) if pins else None,
    )  # fmt: skip
    if new:
        return Opening(batch_id, 0, turn(db))
    stored = str(db.scalar(select(BATCHES.c.id).where(BATCHES.c.idempotency_key == key)))
    last = db.scalar(select(func.max(JOBS.c.seq)).where(JOBS.c.batch_id == stored))
    return Opening(stored, 0 if last is None else last + 1, turn(db))


def now(db: Connection) -> tuple[float, float]:
    """The database's clock, and the current turn."""
    when, current = _now.run(db).one()
    return when, current or 0.0


def add_singles(db: Connection, singles: Sequence[Single], turns: Sequence[float], when: float, fleet: str) -> None:
    """Add jobs that were submitted alone, and their batches. Nobody else knows these batches yet, so nothing of what
    `add` looks for can have happened to them. Existing rows stay as they are: this may be the repetition of a commit
    whose acknowledgement was lost."""
    batches = [{"id": single.batch_id, "total": 1, "about": "{}", "created_at": when} for single in singles]
    jobs = [
        rows.job_row(single.batch_id, 0, single.spec, turn)
        | {"created_at": when, "image": single.image, "fleet": fleet, "twin_of": None, "digest": None}
        for single, turn in zip(singles, turns, strict=True)
    ]
    _add_batches.run(db, batches)
    _add.run(db, jobs)


def turn(db: Connection) -> float:
    """The current turn (fair share): how far the claims of jobs have come."""
    return _turn.run(db).scalar() or 0.0


def add(
    db: Connection,
    added: Sequence[dict[str, Any]],
    digests: Sequence[str] | None,
    leaders: Mapping[int, str],
    images: Sequence[str] | None,
    fleet: str = "",
    state: str = State.QUEUED,
) -> set[str]:
    """Add the rows of some jobs of one batch. Existing rows stay as they are: a second process may resume a submission
    while the first one still runs. If the batch was cancelled meanwhile, the jobs end at once. Returns the ids of the
    jobs that got the result of their leader."""
    if not added:
        return set()
    cancelled_at, now = _cancelled.run(db, of_batch=added[0]["batch_id"]).one()
    if cancelled_at is not None:
        leaders = {}
    # The leaders are locked, so that none of them can end unnoticed while its twins are being added.
    waited_for = set(leaders.values())
    dedup.hold(db, waited_for, read=True)
    for place, row in enumerate(added):
        leader = leaders.get(row["seq"])
        row |= {"created_at": now, "twin_of": leader, "state": TWIN if leader else state}
        row |= {"digest": digests and digests[place], "image": images and images[place], "fleet": fleet}
    _add.run(db, added)
    if cancelled_at is not None:
        cancel(db, [row["id"] for row in added])
    return endings.share(db, waited_for)


def pin(db: Connection, batch_id: str, name: str, digest: str) -> str:
    """Pin this name of an image for all jobs of a batch, unless it is pinned already. Returns the pinned digest."""
    row = select(BATCHES.c.pins).where(BATCHES.c.id == batch_id).with_for_update()
    pins: dict[str, str] = json.loads(db.scalar(row) or "{}")
    if name not in pins:
        pins[name] = digest
        db.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(pins=json.dumps(pins)))
    return pins[name]


def plan(db: Connection, batch_id: str) -> Plan:
    """What is left to do with a batch, and the images that are pinned for it."""
    row = db.execute(select(BATCHES.c.todo, BATCHES.c.pins).where(BATCHES.c.id == batch_id)).one()
    return Plan(row.todo or "", json.loads(row.pins or "{}"))


def foreign(db: Connection, which: Any, fleet: str) -> list[str]:
    """The ids of the open jobs with this SQL condition that belong to another fleet."""
    others = and_(which, JOBS.c.state.in_(OPEN), JOBS.c.fleet != fleet)
    return list(db.scalars(select(JOBS.c.id).where(others).order_by(JOBS.c.seq)))


def move(db: Connection, job_ids: Sequence[str], fleet: str) -> None:
    """Let the workers of this fleet run these jobs."""
    dedup.hold(db, job_ids)
    db.execute(update(JOBS).where(JOBS.c.id.in_(job_ids)).values(fleet=fleet))


def mark(db: Connection, batch_id: str, old: str, new: Todo | None) -> None:
    """Replace what is left to do with a batch, unless another process has changed it meanwhile."""
    unchanged = (BATCHES.c.id == batch_id, BATCHES.c.todo == old)
    db.execute(update(BATCHES).where(*unchanged).values(todo=null() if new is None else new))


def begin_cancelling(db: Connection, batch_id: str) -> None:
    """Mark a batch as cancelled. The steps of the batch then cancel its jobs."""
    when = func.coalesce(BATCHES.c.cancelled_at, clock())
    db.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(cancelled_at=when, todo=Todo.CANCELLING))


def forget_key(db: Connection, batch_id: str) -> None:
    """Delete the idempotency key of a batch, so that the same submission begins anew."""
    db.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(idempotency_key=null()))


def abandoned(db: Connection, seconds: float) -> list[str]:
    """Batches whose queueing or cancelling was begun more than `seconds` ago and is not finished."""
    return list(db.scalars(interrupted(seconds)))


def interrupted(seconds: Any) -> Any:
    """The query for these batches."""
    begun = func.coalesce(BATCHES.c.cancelled_at, BATCHES.c.created_at)
    left = one_of(BATCHES.c.todo, [Todo.QUEUEING, Todo.CANCELLING])
    return select(BATCHES.c.id).where(UNFINISHED, left, begun < clock() - seconds)


def steps(db: Connection, batch_id: str, size: int) -> list[Step]:
    """The steps, of `size` jobs each, that finish the queueing or cancelling of a batch."""
    row = db.execute(select(BATCHES.c.todo, BATCHES.c.total).where(BATCHES.c.id == batch_id)).one()
    if row.todo not in (Todo.QUEUEING, Todo.CANCELLING):
        return []
    todo, starts = Todo(row.todo), range(0, row.total, size)
    if todo is Todo.CANCELLING:
        # A twin comes after its leader. In forward order it would be queued in its leader's place, and might run.
        starts = starts[::-1]
    return [Step(todo, start) for start in (*starts, -1)]


def take(db: Connection, batch_id: str, step: Step, size: int) -> int:
    """Take one of the steps. Returns how many jobs ended."""
    part = span(batch_id, step.start, size)
    if step.start < 0:
        mark(db, batch_id, step.todo, None)
    elif step.todo is Todo.QUEUEING:
        db.execute(update(JOBS).where(part, JOBS.c.state == HELD).values(state=State.QUEUED))
    else:
        return cancel(db, list(db.scalars(select(JOBS.c.id).where(part))))
    return 0


def cancel(db: Connection, job_ids: Sequence[str]) -> int:
    """End the waiting jobs, and mark the running ones so that their workers stop them. Returns how many ended."""
    dedup.hold(db, job_ids)
    which = and_(JOBS.c.id.in_(job_ids), JOBS.c.state.in_(OPEN))
    db.execute(update(JOBS).where(which).values(cancelled_at=clock()))
    waiting = and_(JOBS.c.id.in_(job_ids), JOBS.c.state.in_(WAITING))
    return len(endings.end(db, waiting, Verdict.CANCELLED, endings.CANCELLED_WAITING))


def end_cancelled(db: Connection, job_ids: Sequence[str]) -> None:
    """End those of these jobs that were requeued after their cancellation."""
    which = and_(JOBS.c.id.in_(job_ids), QUEUED, JOBS.c.cancelled_at.is_not(None))
    endings.end(db, which, Verdict.CANCELLED, endings.CANCELLED_WAITING)
