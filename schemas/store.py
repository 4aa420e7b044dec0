"""The queries that change rows, each with a sentence. Queries that only read are in `schemas.reader`, and those that
end jobs are in `schemas.endings`. Nothing is known about a job but what its rows say."""

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, and_, delete, func, insert, null, or_, select, text, union_all, update
from sqlmodel import SQLModel

from schemas import endings, entries, rows, twins
from schemas.base import first_problem
from schemas.database import Database, clock, upsert
from schemas.fleet import Member
from schemas.images import digest_of, name_of, pinned
from schemas.job import JobSpec
from schemas.lease import Lease
from schemas.reader import Reader
from schemas.result import Result
from schemas.tables import CANCELLING, FILLING, HELD, QUEUEING
from schemas.verdict import Priority, State, Verdict

PART = 500
"""Jobs that one transaction changes at most, since other transactions wait for it."""
WHOLE = 5000
"""Jobs of a batch that are stored in one transaction. The jobs of a larger batch are queued when all are stored."""
UNREADABLE_SECONDS = 3600.0
"""How long workers of a version that cannot read a job leave it to other versions."""
ABANDONED_SECONDS = 30.0
"""After so many seconds, a worker finishes the queueing or cancelling of a batch that another process began."""
LETTERS = 1000
"""How many unreadable messages are kept; older ones are deleted."""

_jobs = SQLModel.metadata.tables["jobs"]
_batches = SQLModel.metadata.tables["batches"]
_turns = SQLModel.metadata.tables["turns"]
_workers = SQLModel.metadata.tables["workers"]
_letters = SQLModel.metadata.tables["letters"]
# spelt out: only then do partial indexes apply
_QUEUED, _RUNNING = text("jobs.state = 'queued'"), text("jobs.state = 'running'")


@dataclass(frozen=True)
class Claim:
    """The result of a claim."""

    leases: list[Lease]
    unreadable: dict[str, str]
    """Job id → reason: jobs of a newer version, which were put back for workers that can read them."""
    passed_over: bool = False
    """Whether fewer jobs than asked for were found while others were locked by another transaction."""

    @property
    def count(self) -> int:
        """How many jobs were found, the unreadable ones included."""
        return len(self.leases) + len(self.unreadable)


class Store(Reader):
    """The one door to the rows."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._lanes: dict[Priority, float] = {}
        """The turn for the next single job of each priority. Single jobs of one process get consecutive turns, like the
        jobs of a batch. If each got the current turn, ten thousand single jobs would all go before a batch."""
        self._lane = threading.Lock()

    # -- submission --------------------------------------------------------------------------------

    def add_batch(
        self,
        batch_id: str,
        specs: Sequence[JobSpec],
        name: str | None,
        key: str | None,
        digests: Sequence[str] | None = None,
        images: Sequence[str] | None = None,
    ) -> str:
        """Store a batch and its jobs, all or nothing. Returns its id, or that of the batch that has this key already
        and stays as it is. With digests, jobs of the same digest are run once."""
        todo = entries.filling(specs) if len(specs) > WHOLE else None
        pins = {name_of(image): digest for image in set(images or ()) if todo and (digest := digest_of(image))}
        with self.database.write() as db:
            stored, _ = entries.open_batch(db, batch_id, len(specs), name, key, {}, todo, pins)
            if stored == batch_id and todo is None:
                turn, leaders = self._turn(db, specs), twins.leaders(batch_id, 0, digests or (), {})
                added = [rows.job_row(batch_id, seq, spec, turn) for seq, spec in enumerate(specs)]
                entries.add(db, added, digests, leaders, images)
        if stored == batch_id and todo is not None:
            self._fill(batch_id, todo, specs, digests, images)
        return stored

    def fill(
        self,
        batch_id: str,
        specs: Sequence[JobSpec],
        digests: Sequence[str] | None = None,
        images: Sequence[str] | None = None,
    ) -> bool:
        """Complete a large batch whose submission was interrupted. A complete batch stays as it is. Returns False if
        the batch is being filled with other jobs."""
        with self.database.read() as db:
            batch = db.execute(select(_batches.c.todo, _batches.c.pins).where(_batches.c.id == batch_id)).one()
        if not (batch.todo or "").startswith(FILLING):
            return True
        if batch.todo != entries.filling(specs):
            return False
        pins: dict[str, str] = json.loads(batch.pins or "{}")  # the tags may have moved since the first part
        places = [pinned(name_of(image), pins.get(name_of(image)) or digest_of(image)) for image in images or ()]
        self._fill(batch_id, batch.todo, specs, digests, places or None)
        return True

    def open_batch(
        self, batch_id: str, total: int, name: str | None, key: str | None, about: Mapping[str, Any]
    ) -> tuple[str, int, float]:
        """Store a batch whose jobs follow in parts. Its id, or that of the batch that has this key already; how many of
        its jobs are there; and how far the turns have come."""
        with self.database.write() as db:
            stored, there = entries.open_batch(db, batch_id, total, name, key, about)
            return stored, there, db.scalar(select(_turns.c.value)) or 0.0

    def add_jobs(
        self,
        batch_id: str,
        start: int,
        specs: Sequence[JobSpec],
        turn: float,
        digests: Sequence[str] | None = None,
        leaders: Mapping[int, str] | None = None,
        images: Sequence[str] | None = None,
        *,
        first: int = 0,
    ) -> set[str]:
        """Store the jobs of a batch from its `start`-th on; `first` is where this submission began. Jobs with a leader
        (place in the batch → job id) get its result as soon as it exists. Returns the jobs that got it already."""
        added = [rows.job_row(batch_id, start + i, spec, turn, first=first) for i, spec in enumerate(specs)]
        with self.database.write() as db:
            return entries.add(db, added, digests, leaders or {}, images)

    def known(self, digests: Sequence[str]) -> dict[str, str]:
        """Jobs that were run in earlier batches, by the digest they share with these."""
        with self.database.read() as db:
            return twins.known(db, digests)

    def finish(self, batch_id: str) -> int:
        """Do what is left to do with a batch: queue its stored jobs, or cancel them. This takes several transactions,
        so that others need not wait long. Returns how many jobs ended."""
        return sum(self.finish_part(batch_id, *part) for part in self.left(batch_id))

    def left(self, batch_id: str) -> list[tuple[str, int]]:
        """What is left to do with a batch, in parts: what to do, and the place in the batch at which the part begins.
        The last part has the place -1 and marks the batch as done."""
        with self.database.read() as db:
            todo, total = db.execute(select(_batches.c.todo, _batches.c.total).where(_batches.c.id == batch_id)).one()
        if todo not in (QUEUEING, CANCELLING):
            return []
        starts = range(0, total, PART)
        if todo == CANCELLING:
            # A twin comes after its leader. In forward order it would be queued in its leader's place, and might run.
            starts = starts[::-1]
        return [(todo, start) for start in (*starts, -1)]

    def finish_part(self, batch_id: str, todo: str, start: int) -> int:
        """Do one of these parts. Returns how many jobs ended."""
        span = and_(_jobs.c.batch_id == batch_id, _jobs.c.seq >= start, _jobs.c.seq < start + PART)
        with self.database.write() as db:
            if start < 0:
                done = update(_batches).where(_batches.c.id == batch_id, _batches.c.todo == todo)
                db.execute(done.values(todo=null()))
            elif todo == QUEUEING:
                db.execute(update(_jobs).where(span, _jobs.c.state == HELD).values(state=State.QUEUED))
            else:
                return entries.cancel(db, list(db.scalars(select(_jobs.c.id).where(span))))
        return 0

    def abandoned(self) -> list[str]:
        """Batches whose queueing or cancelling was begun `ABANDONED_SECONDS` ago and is not finished."""
        begun = func.coalesce(_batches.c.cancelled_at, _batches.c.created_at)
        theirs = _batches.c.todo.in_([QUEUEING, CANCELLING])
        which = (text("todo IS NOT NULL"), theirs, begun < clock() - ABANDONED_SECONDS)
        with self.database.read() as db:
            return list(db.scalars(select(_batches.c.id).where(*which)))

    # -- leases ------------------------------------------------------------------------------------

    def claim(
        self, count: int, worker: str, seconds: float, *, version: str = "", without: Collection[str] = ()
    ) -> Claim:
        """Claim up to `count` queued jobs in the order of their turns, except those with an image in `without`. Each
        claim is one more attempt. Jobs that this version cannot read are put back untried."""
        mark = _unread(version)
        ours = or_(_jobs.c.lease_until.is_(None), _jobs.c.worker.not_in([worker, mark]), _jobs.c.lease_until < clock())
        which: list[Any] = [_QUEUED, _jobs.c.cancelled_at.is_(None), ours]
        if without:
            which.append(or_(_jobs.c.image.is_(None), _jobs.c.image.not_in(without)))
        first: list[Any] = [
            select(
                select(_jobs.c.id, _jobs.c.rank)
                .where(*which, _jobs.c.priority == priority.value)
                .order_by(_jobs.c.rank)
                .limit(count)
                # PostgreSQL: skip what another transaction has locked, mostly another claim. Waiting for it would keep
                # this worker from the jobs that it can have.
                .with_for_update(skip_locked=True)
                .subquery()
            )
            for priority in Priority
        ]
        next_ones = union_all(*first).subquery()
        claim = (
            update(_jobs)
            .where(_jobs.c.id.in_(select(next_ones.c.id).order_by(next_ones.c.rank).limit(count)))
            .values(
                state=State.RUNNING, attempt=_jobs.c.attempt + 1, worker=worker,
                lease_until=clock() + seconds, started_at=clock(),
            )
            .returning(
                _jobs.c.id, _jobs.c.batch_id, _jobs.c.spec, _jobs.c.attempt, _jobs.c.created_at, _jobs.c.started_at,
                _jobs.c.rank, _jobs.c.priority, _jobs.c.failures, _jobs.c.image, _jobs.c.digest,
            )
        )  # fmt: skip
        with self.database.write() as db:
            claimed = db.execute(claim).all()
            locks = db.dialect.name == "postgresql" and len(claimed) < count
            passed_over = locks and bool(db.scalar(select(select(_jobs.c.id).where(*which).exists())))
            if claimed:
                reached = max(row.rank - rows.HEAD_START[Priority(row.priority)] for row in claimed)
                # Whoever holds this row may have been cut off: it is not worth waiting for.
                behind = select(_turns.c.id).where(_turns.c.value < reached).with_for_update(skip_locked=True)
                db.execute(update(_turns).where(_turns.c.id.in_(behind)).values(value=reached))
        leases: list[Lease] = []
        unreadable: dict[str, str] = {}
        for row in sorted(claimed, key=lambda row: (row.rank, row.id)):
            try:
                leases.append(rows.lease_of(row))
            except ValidationError as error:
                unreadable[row.id] = first_problem(error, JobSpec)
        if unreadable:
            bad = {row.id: row.attempt for row in claimed if row.id in unreadable}
            self._untried(bad, worker, {"worker": mark, "lease_until": clock() + UNREADABLE_SECONDS})
        return Claim(leases, unreadable, passed_over)

    def put_back(self, leases: Collection[Lease], worker: str, shun: float = 0) -> None:
        """Requeue jobs that were never tried; they get their attempt back. Their worker leaves them to other workers
        for `shun` seconds."""
        until = clock() + shun if shun else null()
        self._untried({lease.job_id: lease.attempt for lease in leases}, worker, {"lease_until": until})

    def disown(self, job_ids: Collection[str]) -> None:
        """Do not share the results of these jobs with later batches: their worker runs them in another way than their
        submitter expected."""
        with self.database.write() as db:
            running = endings.lock(db, job_ids, [State.RUNNING])
            db.execute(update(_jobs).where(_jobs.c.id.in_(running)).values(digest=null()))

    def release(self, lease: Lease, worker: str, failure: str, shun: float = 0) -> None:
        """Requeue a job after a failure of ours. Its worker leaves it to other workers for `shun` seconds."""
        # The number of an attempt alone does not tell leases apart: it is used again after a job was put back untried.
        mine = and_(_jobs.c.attempt == lease.attempt, _jobs.c.worker == worker)
        held = and_(_jobs.c.id == lease.job_id, mine, _RUNNING)
        failures = "\n".join([*lease.failures, failure.replace("\n", " ")])
        until = clock() + shun if shun else null()
        with self.database.write() as db:
            db.execute(update(_jobs).where(held).values(state=State.QUEUED, failures=failures, lease_until=until))
            entries.end_cancelled(db, [lease.job_id])

    def renew(self, held: Mapping[str, int], worker: str, seconds: float) -> tuple[set[str], set[str]]:
        """Prolong the leases held (job id → attempt); which jobs are no longer ours, and which were cancelled."""
        kept: set[str] = set()
        with self.database.write() as db:
            for part in rows.parts(sorted(held)):
                mine = and_(_jobs.c.id.in_(endings.lock(db, part, [State.RUNNING])), _jobs.c.worker == worker)
                prolong = update(_jobs).where(mine).values(lease_until=clock() + seconds)
                renewed = db.execute(prolong.returning(_jobs.c.id, _jobs.c.attempt)).all()
                kept |= {row.id for row in renewed if row.attempt == held[row.id]}
            stopped = select(_jobs.c.id).where(_jobs.c.id.in_(kept), _jobs.c.cancelled_at.is_not(None))
            cancelled = set(db.scalars(stopped))
            rest = select(_jobs.c.id, _jobs.c.state, _jobs.c.attempt).where(_jobs.c.id.in_(held.keys() - kept))
            final = (State.FINISHED, State.CANCELLED)
            # One that has just been finished, by this very attempt, is not lost.
            lost = {row.id for row in db.execute(rest) if not (row.state in final and row.attempt == held[row.id])}
        return lost, cancelled

    def expire(self, max_attempts: int) -> int:
        """Requeue every job whose lease has expired, or end it after so many attempts. Returns how many there were."""
        expired = 0
        while True:
            # Ordered by the index's own column. Ordered by id, SQLite would walk the primary key of all jobs.
            late = select(_jobs.c.id).where(_RUNNING, _jobs.c.lease_until < clock()).order_by(_jobs.c.lease_until)
            with self.database.write() as db:
                # Locked, so that no worker can renew or finish them meanwhile. A row that another transaction has
                # locked is skipped: its worker is just renewing or finishing it.
                ids = list(db.scalars(late.limit(PART).with_for_update(skip_locked=True)))
                if not ids:
                    return expired
                chosen, detail = _jobs.c.id.in_(ids), f"its lease expired in the last of {max_attempts} attempts"
                stopped = and_(chosen, _jobs.c.cancelled_at.is_not(None))
                endings.end(db, stopped, Verdict.CANCELLED, "cancelled while it ran")
                endings.end(db, and_(chosen, _jobs.c.attempt >= max_attempts), Verdict.SANDBOX_ERROR, detail)
                db.execute(update(_jobs).where(chosen, _RUNNING).values(state=State.QUEUED, lease_until=null()))
            expired += len(ids)
            if len(ids) < PART:
                return expired

    # -- workers -----------------------------------------------------------------------------------

    def report(self, member: Member) -> None:
        """Store the heartbeat of a worker, with what it reports about itself."""
        with self.database.write() as db:
            add = upsert(db, _workers).values(name=member.name, seen_at=clock(), about=member.model_dump_json())
            db.execute(
                add.on_conflict_do_update(
                    index_elements=["name"], set_={"seen_at": add.excluded.seen_at, "about": add.excluded.about}
                )
            )

    def retire(self, name: str) -> None:
        """Delete the row of a worker that has ended, and rows without a heartbeat for an hour."""
        gone = or_(_workers.c.name == name, _workers.c.seen_at < clock() - 3600)
        with self.database.write() as db:
            db.execute(delete(_workers).where(gone))

    def pin(self, batch_id: str, name: str, digest: str) -> str:
        """Pin this name of an image for all jobs of a batch, unless it is pinned already. Returns the pinned digest."""
        with self.database.write() as db:
            row = select(_batches.c.pins).where(_batches.c.id == batch_id).with_for_update()
            pins: dict[str, str] = json.loads(db.scalar(row) or "{}")
            if name not in pins:
                pins[name] = digest
                db.execute(update(_batches).where(_batches.c.id == batch_id).values(pins=json.dumps(pins)))
            return pins[name]

    def bury(self, worker: str, reason: str, body: str) -> None:
        """Keep a message that nobody could read. If there are too many, the oldest are deleted."""
        with self.database.write() as db:
            db.execute(insert(_letters).values(worker=worker, reason=reason, body=body, arrived_at=clock()))
            latest = select(func.max(_letters.c.id)).scalar_subquery()
            db.execute(delete(_letters).where(_letters.c.id <= latest - LETTERS))

    # -- results -----------------------------------------------------------------------------------

    def record(self, results: Sequence[Result], writer: str = "") -> set[str]:
        """Store results, all in one commit; the first one of a job wins. The job ids that were new."""
        if not results:
            return set()
        with self.database.write() as db:
            return endings.record(db, results, writer)

    def cancel(self, *, batch_id: str | None = None, job_id: str | None = None) -> int:
        """End the waiting jobs of a batch, or one job, and ask for the end of the running ones; how many ended here."""
        with self._lane:
            self._lanes.clear()  # later single jobs must not wait for the turns of cancelled ones
        if job_id is not None:
            with self.database.write() as db:
                return entries.cancel(db, [job_id])
        with self.database.write() as db:
            marked = update(_batches).where(_batches.c.id == batch_id)
            when = func.coalesce(_batches.c.cancelled_at, clock())
            db.execute(marked.values(cancelled_at=when, todo=CANCELLING))
        return self.finish(str(batch_id))

    # ----------------------------------------------------------------------------------------------

    def _fill(
        self,
        batch_id: str,
        todo: str,
        specs: Sequence[JobSpec],
        digests: Sequence[str] | None,
        images: Sequence[str] | None,
    ) -> None:
        """Store the jobs of a large batch in parts, so that other transactions need not wait, and queue them when all
        are stored."""
        with self.database.read() as db:
            turn = self._turn(db, specs)
        leaders = twins.leaders(batch_id, 0, digests or (), {})
        for start in range(0, len(specs), PART):
            span = slice(start, start + PART)
            added = [rows.job_row(batch_id, seq, spec, turn) for seq, spec in enumerate(specs[span], start)]
            with self.database.write() as db:
                entries.add(db, added, digests and digests[span], leaders, images and images[span], HELD)
        with self.database.write() as db:
            ready = update(_batches).where(_batches.c.id == batch_id, _batches.c.todo == todo)
            db.execute(ready.values(todo=QUEUEING))
        self.finish(batch_id)

    def _turn(self, db: Connection, specs: Sequence[JobSpec]) -> float:
        """The turn at which a submission starts."""
        turn = db.scalar(select(_turns.c.value)) or 0.0
        if len(specs) == 1:
            priority = specs[0].priority
            with self._lane:
                turn = max(turn, self._lanes.get(priority, turn))
                self._lanes[priority] = turn + rows.STRIDE[priority]
        return turn

    def _untried(self, held: Mapping[str, int], worker: str, values: Mapping[str, Any]) -> None:
        """Requeue jobs (job id → attempt) as if they had not been claimed."""
        with self.database.write() as db:
            locked = endings.lock(db, held, [State.RUNNING])
            for attempt in set(held.values()):
                those = [job_id for job_id in locked if held[job_id] == attempt]
                mine = and_(_jobs.c.id.in_(those), _jobs.c.attempt == attempt, _jobs.c.worker == worker, _RUNNING)
                db.execute(update(_jobs).where(mine).values(state=State.QUEUED, attempt=attempt - 1, **values))
            entries.end_cancelled(db, list(held))


def _unread(version: str) -> str:
    """The value of the column `worker` while a job waits for a worker of another version."""
    return f"version {version}"
