"""What is read of the rows: the half of the store that changes nothing."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy import Connection, and_, func, literal, select, text
from sqlmodel import SQLModel

from schemas import rows
from schemas.batch import Batch, Progress
from schemas.database import Database, clock
from schemas.errors import BatchNotFound, JobNotFound
from schemas.fleet import Fleet, Member
from schemas.job import JobSpec
from schemas.result import Result
from schemas.tables import HELD, TWIN
from schemas.verdict import State, Verdict

T = TypeVar("T")

AT_ONCE = 16 << 20
"""Characters of results that are read at once: a batch with large outputs must not fill the memory."""

_jobs = SQLModel.metadata.tables["jobs"]
_batches = SQLModel.metadata.tables["batches"]
_results = SQLModel.metadata.tables["results"]
_cases = SQLModel.metadata.tables["cases"]
_tallies = SQLModel.metadata.tables["tallies"]
_workers = SQLModel.metadata.tables["workers"]
_letters = SQLModel.metadata.tables["letters"]
_QUEUED, _RUNNING = (
    text("jobs.state = 'queued'"),
    text("jobs.state = 'running'"),
)  # spelt out: only then do partial indexes apply
# rows of older versions have no size
_size = func.coalesce(_results.c.size, func.length(_results.c.stdout) + func.length(_results.c.stderr))
_joined = (_results, _jobs.c.task_id, _jobs.c.sample_id, _jobs.c.labels, _jobs.c.created_at)


class Reader:
    """Every question that can be asked."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def ping(self) -> None:
        """Raises when the database does not answer."""
        with self.database.read() as db:
            db.execute(select(literal(1)))

    def batch(self, batch_id: str) -> Batch:
        """One batch, or `BatchNotFound`."""
        with self.database.read() as db:
            row = db.execute(select(_batches).where(_batches.c.id == batch_id)).one_or_none()
        if row is None:
            raise BatchNotFound(batch_id)
        return Batch(
            id=row.id, name=row.name, idempotency_key=row.idempotency_key, total=row.total,
            created_at=rows.moment(row.created_at), cancelled=row.cancelled_at is not None,
            about=json.loads(row.about) if row.about else {},
        )  # fmt: skip

    def state(self, job_id: str) -> State:
        """How far a job has come, or `JobNotFound`."""
        with self.database.read() as db:
            found = db.scalar(select(_jobs.c.state).where(_jobs.c.id == job_id))
        if found is None:
            raise JobNotFound(job_id)
        return State.QUEUED if found in (TWIN, HELD) else State(found)

    def progress(self, batch_id: str) -> Progress:
        """How many jobs of a batch are in which state, and which verdicts there are; reads few rows for any size."""
        verdicts = (
            select(_tallies.c.verdict, func.sum(_tallies.c.count))
            .where(_tallies.c.batch_id == batch_id)
            .group_by(_tallies.c.verdict)
        )
        under_way = select(func.count()).select_from(_jobs).where(_RUNNING, _jobs.c.batch_id == batch_id)
        with self.database.read() as db:
            total = db.scalar(select(_batches.c.total).where(_batches.c.id == batch_id)) or 0
            running = db.scalar(under_way) or 0
            given = {Verdict(verdict): int(count) for verdict, count in db.execute(verdicts)}
        cancelled, done = given.get(Verdict.CANCELLED, 0), sum(given.values())
        return Progress(
            total=total, queued=max(0, total - done - running), running=running,
            finished=done - cancelled, cancelled=cancelled, verdicts=given,
        )  # fmt: skip

    def done(self, batch_id: str) -> set[str]:
        """The ids of a batch's jobs that have a result."""
        with self.database.read() as db:
            return set(db.scalars(select(_results.c.job_id).where(_results.c.batch_id == batch_id)))

    def results(self, job_ids: Sequence[str]) -> Iterator[list[Result]]:
        """The results of these jobs, as far as they exist, in parts that fit into memory. Each part is in the order of
        submission."""
        for part in rows.parts(job_ids):
            sizes = select(_results.c.job_id, _size).where(_results.c.job_id.in_(part))
            with self.database.read() as db:
                found = {str(job_id): int(size) for job_id, size in db.execute(sizes)}
            for chosen in _by_size([(job_id, found[job_id]) for job_id in part if job_id in found]):
                with self.database.read() as db:
                    results = _results_where(db, _results.c.job_id.in_(chosen), _cases.c.job_id.in_(chosen))
                yield results

    def batch_results(self, batch_id: str) -> Iterator[Result]:
        """Every result of a batch, in the order of submission, a part at a time."""
        for span in self._spans(batch_id):
            sizes = select(_jobs.c.seq, _size).join(_results, _results.c.job_id == _jobs.c.id).where(span)
            with self.database.read() as db:
                found = [(seq, int(size)) for seq, size in db.execute(sizes.order_by(_jobs.c.seq))]
            for chosen in _by_size(found):
                some = and_(_jobs.c.batch_id == batch_id, _jobs.c.seq >= chosen[0], _jobs.c.seq <= chosen[-1])
                with self.database.read() as db:
                    results = _results_where(db, some, _cases.c.job_id.in_(select(_jobs.c.id).where(some)))
                yield from results

    def measures(self, batch_id: str) -> Iterator[Any]:
        """What a report needs of each result, in the order of submission, a part at a time."""
        query = select(
            _jobs.c.task_id, _jobs.c.seq, _jobs.c.labels, _results.c.job_id, _results.c.verdict,
            _results.c.cpu_seconds, _results.c.wall_seconds, _results.c.peak_memory_bytes, _results.c.limit_share,
            _results.c.rerun, _results.c.shared_with, _results.c.finished_at, _results.c.worker,
            _results.c.image_digest, _results.c.comparator,
        ).join(_jobs, _jobs.c.id == _results.c.job_id)  # fmt: skip
        for span in self._spans(batch_id):
            with self.database.read() as db:
                rows_of = db.execute(query.where(span).order_by(_jobs.c.seq)).all()
            yield from rows_of

    def specs(self, job_ids: Sequence[str]) -> dict[str, JobSpec]:
        """The specs of these jobs, without those that this version cannot read."""
        found: dict[str, JobSpec] = {}
        with self.database.read() as db:
            for part in rows.parts(job_ids):
                for row in db.execute(select(_jobs.c.id, _jobs.c.spec).where(_jobs.c.id.in_(part))):
                    with suppress(ValueError):
                        found[row.id] = JobSpec.model_validate_json(row.spec)
        return found

    def stored(self, batch_id: str, start: int, count: int) -> list[str]:
        """The specs of up to `count` jobs of a batch, as JSON, from its `start`-th on."""
        span = and_(_jobs.c.batch_id == batch_id, _jobs.c.seq >= start, _jobs.c.seq < start + count)
        with self.database.read() as db:
            return list(db.scalars(select(_jobs.c.spec).where(span).order_by(_jobs.c.seq)))

    def fleet(self, seconds: float) -> Fleet:
        """The workers whose last heartbeat is at most so many seconds old."""
        alive = select(_workers.c.about).where(_workers.c.seen_at > clock() - seconds).order_by(_workers.c.name)
        with self.database.read() as db:
            return Fleet(members=tuple(Member.model_validate_json(about) for about in db.scalars(alive)))

    def waiting(self, batch_id: str) -> list[tuple[str | None, bool, int]]:
        """The queued jobs of a batch, grouped: their image, whether a worker's version could not read them, and how
        many there are. It reads the whole batch, so it is only for people who ask why nothing happens."""
        left = and_(_jobs.c.worker.like("version %"), _jobs.c.lease_until > clock())
        unread = func.coalesce(left, False)
        query = select(_jobs.c.image, unread, func.count()).where(_jobs.c.batch_id == batch_id, _QUEUED)
        with self.database.read() as db:
            return [(image, bool(no), count) for image, no, count in db.execute(query.group_by(_jobs.c.image, unread))]

    def letters(self) -> int:
        """How many messages that nobody could read are kept."""
        with self.database.read() as db:
            return db.scalar(select(func.count()).select_from(_letters)) or 0

    def _spans(self, batch_id: str) -> Iterator[Any]:
        for start in range(0, self.batch(batch_id).total, rows.IDS_AT_ONCE):
            end = start + rows.IDS_AT_ONCE
            yield and_(_jobs.c.batch_id == batch_id, _jobs.c.seq >= start, _jobs.c.seq < end)


def _by_size(found: Sequence[tuple[T, int]]) -> Iterator[list[T]]:
    """Split results into parts that fit into memory. A result that is too large is a part of its own."""
    part: list[T] = []
    total = 0
    for each, size in found:
        if part and total + size > AT_ONCE:
            yield part
            part, total = [], 0
        part.append(each)
        total += size
    if part:
        yield part


def _results_where(db: Connection, which: Any, which_cases: Any) -> list[Result]:
    query = select(*_joined).join(_jobs, _jobs.c.id == _results.c.job_id).where(which)
    found = db.execute(query.order_by(_jobs.c.batch_id, _jobs.c.seq)).mappings().all()
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for case in db.execute(select(_cases).where(which_cases).order_by(_cases.c.job_id, _cases.c.index)).mappings():
        cases.setdefault(case["job_id"], []).append(dict(case))
    return [rows.result_of(dict(row), cases.get(row["job_id"], ())) for row in found]
