"""The store: the one door to the rows. Its methods decide what happens in one transaction and what in several; the
queries themselves, each with a sentence, are in the modules that it calls:

- `entries`: how jobs enter the queue, and how they are cancelled
- `claims`: how workers claim jobs, renew their leases and give jobs back
- `endings`: how jobs get their results
- `dedup`: identical jobs, of which one is run
- `registry`: workers and dead letters
- `views`: everything that is only read

Nothing is known about a job but what its rows say.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import literal, select

from evalpool.schemas import claims, dedup, endings, entries, registry, rows, views
from evalpool.schemas.batch import Batch, Progress
from evalpool.schemas.claims import Pending
from evalpool.schemas.database import Database
from evalpool.schemas.entries import Opening, Single, Step
from evalpool.schemas.fleet import Fleet, Member
from evalpool.schemas.images import digest_of, name_of, pinned
from evalpool.schemas.job import JobSpec
from evalpool.schemas.lease import Claim, Lease, Renewal
from evalpool.schemas.result import Result
from evalpool.schemas.tables import Todo, span
from evalpool.schemas.verdict import HELD, Priority, State
from evalpool.schemas.views import Waiting

PART = 250
"""Jobs that one transaction changes at most, since other transactions wait for it."""
WHOLE = 5000
"""Jobs of a batch that are stored in one transaction. The jobs of a larger batch are queued when all are stored."""
ABANDONED_SECONDS = 30.0
"""After so many seconds, a worker finishes the queueing or cancelling of a batch that another process began."""


class Store:
    """The rows of one database, as the members of one fleet see them."""

    def __init__(self, database: Database, fleet: str = "") -> None:
        self.database, self.own_fleet = database, fleet
        """Jobs are added to, and claimed from, the fleet of this name. Everything else concerns all jobs."""
        self._lanes: dict[Priority, float] = {}
        """The turn for the next single job of each priority. Single jobs of one process get consecutive turns, like the
        jobs of a batch. If each got the current turn, ten thousand single jobs would all go before a batch."""
        self._lane = threading.Lock()

    def ping(self) -> None:
        """Raise an error if the database does not answer."""
        with self.database.read() as db:
            db.execute(select(literal(1)))

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
        """Store a batch and its jobs, all or nothing. Returns its id, or that of the batch that has this idempotency
        key already and stays as it is. With digests, jobs of the same digest are run once."""
        todo = entries.filling(specs) if len(specs) > WHOLE else None
        pins = {name_of(image): digest for image in set(images or ()) if todo and (digest := digest_of(image))}
        with self.database.write() as db:
            opening = entries.open_batch(db, batch_id, len(specs), name, key, {}, todo, pins)
            if opening.batch_id == batch_id and todo is None:
                turn, leaders = self._turn(opening.turn, specs), dedup.find_leaders(batch_id, 0, digests or (), {})
                added = [rows.job_row(batch_id, seq, spec, turn) for seq, spec in enumerate(specs)]
                entries.add(db, added, digests, leaders, images, self.own_fleet)
        if opening.batch_id == batch_id and todo is not None:
            self._fill(batch_id, todo, specs, digests, images)
        return opening.batch_id

    def add_singles(self, singles: Sequence[Single]) -> None:
        """Store jobs that were submitted one by one, each in a batch of its own, all in one transaction."""
        with self.database.write() as db:
            now, turn = entries.now(db)
            turns = [self._turn(turn, [single.spec]) for single in singles]
            entries.add_singles(db, singles, turns, now, self.own_fleet)

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
            plan = entries.plan(db, batch_id)
        if not plan.filling:
            return True
        if plan.todo != entries.filling(specs):
            return False
        # The tags may have moved since the first part was stored.
        places = [pinned(name_of(image), plan.pins.get(name_of(image)) or digest_of(image)) for image in images or ()]
        self._fill(batch_id, plan.todo, specs, digests, places or None)
        return True

    def open_batch(
        self, batch_id: str, total: int, name: str | None, key: str | None, about: Mapping[str, Any]
    ) -> Opening:
        """Store a batch whose jobs follow in parts. A batch that has this idempotency key already stays as it is, and
        is opened instead."""
        with self.database.write() as db:
            return entries.open_batch(db, batch_id, total, name, key, about)

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
            return entries.add(db, added, digests, leaders or {}, images, self.own_fleet)

    def pin(self, batch_id: str, name: str, digest: str) -> str:
        """Pin this name of an image for all jobs of a batch, unless it is pinned already. Returns the pinned digest."""
        with self.database.write() as db:
            return entries.pin(db, batch_id, name, digest)

    def known(self, digests: Sequence[str]) -> dict[str, str]:
        """Digest → id of the latest job with this digest that was run and got a verdict."""
        with self.database.read() as db:
            return dedup.known(db, digests)

    def adopt(self, batch_id: str) -> int:
        """Let the workers of this fleet run what is left of a batch, whoever submitted it. Returns how many jobs were
        moved. A twin stays with its leader, which is in the same batch and moves, too."""
        moved = 0
        for part in self._spans(batch_id):
            with self.database.read() as db:
                ids = entries.foreign(db, part, self.own_fleet)
            for start in range(0, len(ids), PART):
                with self.database.write() as db:
                    entries.move(db, ids[start : start + PART], self.own_fleet)
            moved += len(ids)
        return moved

    # -- cancelling and finishing ------------------------------------------------------------------

    def cancel(self, *, batch_id: str | None = None, job_id: str | None = None) -> int:
        """End the waiting jobs of a batch, or one job, and ask the workers to stop the running ones. Returns how many
        jobs ended here."""
        with self._lane:
            self._lanes.clear()  # later single jobs must not wait for the turns of cancelled ones
        if job_id is not None:
            with self.database.write() as db:
                return entries.cancel(db, [job_id])
        with self.database.write() as db:
            entries.begin_cancelling(db, str(batch_id))
        return self.finish(str(batch_id))

    def give_up(self, batch_id: str) -> int:
        """Cancel a batch and forget its idempotency key, so that the same submission begins anew. Returns how many jobs
        were cancelled here."""
        with self.database.write() as db:
            entries.forget_key(db, batch_id)
        return self.cancel(batch_id=batch_id)

    def finish(self, batch_id: str) -> int:
        """Finish the queueing or cancelling of a batch, in several transactions, so that others need not wait long.
        Returns how many jobs ended."""
        return sum(self.take_step(batch_id, step) for step in self.steps(batch_id))

    def steps(self, batch_id: str) -> list[Step]:
        """The steps that finish the queueing or cancelling of a batch, to be taken in this order."""
        with self.database.read() as db:
            return entries.steps(db, batch_id, PART)

    def take_step(self, batch_id: str, step: Step) -> int:
        """Take one of these steps. Returns how many jobs ended."""
        with self.database.write() as db:
            return entries.take(db, batch_id, step, PART)

    def abandoned(self) -> list[str]:
        """Batches whose queueing or cancelling was begun more than `ABANDONED_SECONDS` ago and is not finished."""
        with self.database.read() as db:
            return entries.abandoned(db, ABANDONED_SECONDS)

    def pending(self) -> Pending:
        """What there is to do for a worker of this fleet: waiting jobs, expired leases, interrupted batches."""
        with self.database.glance() as db:
            return claims.pending(db, self.own_fleet, ABANDONED_SECONDS)

    # -- leases ------------------------------------------------------------------------------------

    def claim(
        self, count: int, worker: str, seconds: float, *, version: str = "", without: Collection[str] = ()
    ) -> Claim:
        """Claim up to `count` queued jobs of this fleet in the order of their turns, except those with an image in
        `without`. Each claim is one more attempt. Jobs that this version cannot read are put back untried."""
        with self.database.write() as db:
            claimed = claims.claim(db, count, worker, seconds, fleet=self.own_fleet, version=version, without=without)
        claim = claims.read(claimed)
        if claim.unreadable:
            attempts = {row.id: row.attempt for row in claimed.rows if row.id in claim.unreadable}
            with self.database.write() as db:
                claims.leave(db, attempts, worker, version)
        return claim

    def put_back(self, leases: Collection[Lease], worker: str, shun: float = 0) -> None:
        """Requeue jobs that were never tried; they get their attempt back. Their worker leaves them to other workers
        for `shun` seconds."""
        with self.database.write() as db:
            claims.put_back(db, leases, worker, shun)

    def disown(self, job_ids: Collection[str]) -> None:
        """Do not share the results of these jobs with later batches: their worker runs them in another way than their
        submitter expected."""
        with self.database.write() as db:
            claims.disown(db, job_ids)

    def release(self, lease: Lease, worker: str, failure: str, shun: float = 0) -> None:
        """Requeue a job after a failure of ours. Its worker leaves it to other workers for `shun` seconds."""
        with self.database.write() as db:
            claims.release(db, lease, worker, failure, shun)

    def renew(self, attempts: Mapping[str, int], worker: str, seconds: float) -> Renewal:
        """Keep the leases that a worker holds (job id → attempt), for at least two thirds of `seconds` from now. Only
        those that have less time left are prolonged."""
        with self.database.glance() as db:
            renewal, due = claims.held(db, attempts, worker, seconds)
        for part in rows.parts(due):
            with self.database.write() as db:
                claims.prolong(db, part, worker, seconds)
        return renewal

    def expire(self, max_attempts: int) -> int:
        """Requeue every job whose lease has expired, or end it as `sandbox_error` after so many attempts. Returns how
        many jobs there were."""
        expired, count = 0, PART
        while count == PART:
            with self.database.write() as db:
                count = claims.expire(db, max_attempts, PART)
            expired += count
        return expired

    def record(self, results: Sequence[Result], writer: str = "") -> set[str]:
        """Store results, all in one commit; the first result of a job wins. Returns the ids of the jobs that got their
        result by this, their twins included."""
        if not results:
            return set()
        with self.database.write() as db:
            return endings.record(db, results, writer)

    # -- workers and dead letters ------------------------------------------------------------------

    def report(self, member: Member) -> None:
        """Store the heartbeat of a worker, with what it reports about itself."""
        with self.database.write() as db:
            registry.report(db, member)

    def retire(self, name: str) -> None:
        """Delete the row of a worker that has ended, and the rows of workers that were not seen for an hour."""
        with self.database.write() as db:
            registry.retire(db, name)

    def members(self, seconds: float) -> tuple[Member, ...]:
        """The workers of all fleets whose last heartbeat is at most so many seconds old."""
        with self.database.read() as db:
            return registry.members(db, seconds)

    def fleet(self, seconds: float) -> Fleet:
        """The workers of this fleet whose last heartbeat is at most so many seconds old."""
        return Fleet(members=tuple(each for each in self.members(seconds) if each.fleet == self.own_fleet))

    def last_seen(self) -> float | None:
        """Seconds since the latest heartbeat of any worker of this fleet; `None` if no worker is known."""
        with self.database.read() as db:
            return registry.last_seen(db, self.own_fleet)

    def bury(self, worker: str, reason: str, body: str) -> None:
        """Keep a message that no worker could read (a dead letter). If there are too many, the oldest are deleted."""
        with self.database.write() as db:
            registry.bury(db, worker, reason, body)

    def letters(self) -> int:
        """How many dead letters are kept."""
        with self.database.read() as db:
            return registry.letters(db)

    # -- reading -----------------------------------------------------------------------------------

    def batch(self, batch_id: str) -> Batch:
        """One batch. Raises `BatchNotFound`."""
        with self.database.read() as db:
            return views.batch(db, batch_id)

    def state(self, job_id: str) -> State:
        """The state of a job that callers see. Raises `JobNotFound`."""
        with self.database.glance() as db:
            return views.state(db, job_id)

    def progress(self, batch_id: str) -> Progress:
        """How many jobs of a batch are in which state, and how many have which verdict."""
        with self.database.read() as db:
            return views.progress(db, batch_id)

    def counts(self, batch_ids: Sequence[str]) -> dict[str, int]:
        """Batch id → how many of its jobs have a result. Batches without a result are left out."""
        with self.database.read() as db:
            return views.counts(db, batch_ids)

    def done(self, batch_id: str) -> set[str]:
        """The ids of a batch's jobs that have a result."""
        with self.database.read() as db:
            return views.done(db, batch_id)

    def results(self, job_ids: Sequence[str]) -> Iterator[list[Result]]:
        """The results of those of these jobs that have one, in portions that fit into memory. Each portion is in the
        order of submission."""
        for part in rows.parts(job_ids):
            with self.database.read() as db:
                first, *others = [part] if len(part) == 1 else views.portions(db, part) or [[]]
                results = views.results(db, first) if first else []
            if results:
                yield results
            for ids in others:
                with self.database.read() as db:
                    results = views.results(db, ids)
                yield results

    def batch_results(self, batch_id: str) -> Iterator[Result]:
        """Every result of a batch, in the order of submission. They are read in portions that fit into memory."""
        for part in self._spans(batch_id):
            with self.database.read() as db:
                portions = views.portions_where(db, part)
            for places in portions:
                with self.database.read() as db:
                    results = views.results_in(db, batch_id, places[0], places[-1] + 1)
                yield from results

    def measures(self, batch_id: str) -> Iterator[Any]:
        """What a report needs of each result of a batch, in the order of submission."""
        for part in self._spans(batch_id):
            with self.database.read() as db:
                measures = views.measures(db, part)
            yield from measures

    def specs(self, job_ids: Sequence[str]) -> dict[str, JobSpec]:
        """Job id → spec, without the jobs that this version cannot read."""
        with self.database.read() as db:
            return views.specs(db, job_ids)

    def stored(self, batch_id: str, start: int, count: int) -> list[str]:
        """The specs of up to `count` jobs of a batch, as JSON, from its `start`-th on."""
        with self.database.read() as db:
            return views.stored(db, batch_id, start, count)

    def waiting(self, batch_id: str) -> list[Waiting]:
        """The jobs of a batch that are queued, or whose lease has expired, by reason. Reads the whole batch, so it is
        only for people who ask why nothing happens."""
        with self.database.read() as db:
            return views.waiting(db, batch_id)

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
            turn = self._turn(entries.turn(db), specs)
        leaders = dedup.find_leaders(batch_id, 0, digests or (), {})
        for start in range(0, len(specs), PART):
            part = slice(start, start + PART)
            added = [rows.job_row(batch_id, seq, spec, turn) for seq, spec in enumerate(specs[part], start)]
            with self.database.write() as db:
                places = images and images[part]
                entries.add(db, added, digests and digests[part], leaders, places, self.own_fleet, HELD)
        with self.database.write() as db:
            entries.mark(db, batch_id, todo, Todo.QUEUEING)
        self.finish(batch_id)

    def _turn(self, turn: float, specs: Sequence[JobSpec]) -> float:
        """The turn at which a submission starts, if `turn` is the current one."""
        if len(specs) == 1:
            priority = specs[0].priority
            with self._lane:
                turn = max(turn, self._lanes.get(priority, turn))
                self._lanes[priority] = turn + rows.STRIDE[priority]
        return turn

    def _spans(self, batch_id: str) -> Iterator[Any]:
        """The SQL conditions for the jobs of a batch, in parts of bounded size. Raises `BatchNotFound`."""
        for start in range(0, self.batch(batch_id).total, rows.IDS_AT_ONCE):
            yield span(batch_id, start, rows.IDS_AT_ONCE)
