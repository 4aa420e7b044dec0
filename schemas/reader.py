"""What is read of the rows: the half of the store that changes nothing."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, func, literal, select, text
from sqlmodel import SQLModel

from schemas import rows
from schemas.batch import Batch, Progress
from schemas.database import Database
from schemas.errors import BatchNotFound, JobNotFound
from schemas.job import JobSpec
from schemas.result import Result
from schemas.tables import TWIN
from schemas.verdict import State, Verdict

IDS_AT_ONCE = 5000
"""Ids in one statement; SQLite takes at most 32,766 variables."""

_jobs = SQLModel.metadata.tables["jobs"]
_batches = SQLModel.metadata.tables["batches"]
_results = SQLModel.metadata.tables["results"]
_cases = SQLModel.metadata.tables["cases"]
_letters = SQLModel.metadata.tables["letters"]
_RUNNING = text("jobs.state = 'running'")  # spelt out: only then do partial indexes apply
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
        return State.QUEUED if found == TWIN else State(found)

    def progress(self, batch_id: str) -> Progress:
        """How many jobs of a batch are in which state, and which verdicts there are; counted in indexes alone."""
        verdicts = (
            select(_results.c.verdict, func.count()).where(_results.c.batch_id == batch_id).group_by(_results.c.verdict)
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

    def results(self, job_ids: Sequence[str]) -> list[Result]:
        """The results there are among these jobs, in the order of submission."""
        found: list[Result] = []
        with self.database.read() as db:
            for part in parts(job_ids):
                found += _results_where(db, _results.c.job_id.in_(part), _cases.c.job_id.in_(part))
        return found

    def batch_results(self, batch_id: str) -> Iterator[Result]:
        """Every result of a batch, in the order of submission, a part at a time."""
        for span in self._spans(batch_id):
            with self.database.read() as db:
                found = _results_where(db, span, _cases.c.job_id.in_(select(_jobs.c.id).where(span)))
            yield from found

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
                found = db.execute(query.where(span).order_by(_jobs.c.seq)).all()
            yield from found

    def specs(self, job_ids: Sequence[str]) -> dict[str, JobSpec]:
        """What these jobs were asked to run."""
        found: dict[str, JobSpec] = {}
        with self.database.read() as db:
            for part in parts(job_ids):
                for row in db.execute(select(_jobs.c.id, _jobs.c.spec).where(_jobs.c.id.in_(part))):
                    found[row.id] = JobSpec.model_validate_json(row.spec)
        return found

    def _spans(self, batch_id: str) -> Iterator[Any]:
        for start in range(0, self.batch(batch_id).total, IDS_AT_ONCE):
            yield and_(_jobs.c.batch_id == batch_id, _jobs.c.seq >= start, _jobs.c.seq < start + IDS_AT_ONCE)

    def letters(self) -> int:
        """How many such messages there are."""
        with self.database.read() as db:
            return db.scalar(select(func.count()).select_from(_letters)) or 0


def parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), IDS_AT_ONCE):
        yield ids[start : start + IDS_AT_ONCE]


def _results_where(db: Connection, which: Any, which_cases: Any) -> list[Result]:
    query = select(*_joined).join(_jobs, _jobs.c.id == _results.c.job_id).where(which)
    found = db.execute(query.order_by(_jobs.c.batch_id, _jobs.c.seq)).mappings().all()
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for case in db.execute(select(_cases).where(which_cases).order_by(_cases.c.job_id, _cases.c.index)).mappings():
        cases.setdefault(case["job_id"], []).append(dict(case))
    return [rows.result_of(dict(row), cases.get(row["job_id"], ())) for row in found]
