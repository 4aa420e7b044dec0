"""Views of the rows: what is read about batches, jobs and results. Each query runs in the transaction of its
caller."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, and_, func, or_, select

from evalpool.schemas import registry, rows
from evalpool.schemas.batch import Batch, Progress
from evalpool.schemas.database import clock
from evalpool.schemas.errors import BatchNotFound, JobNotFound
from evalpool.schemas.job import JobSpec
from evalpool.schemas.result import Result
from evalpool.schemas.statements import Statement, among, given, number
from evalpool.schemas.tables import BATCHES, CASES, JOBS, QUEUED, RESULTS, RUNNING, TALLIES, span
from evalpool.schemas.verdict import State, Verdict

T = TypeVar("T")

AT_ONCE = 16 << 20
"""Characters of results that are read at once: a batch with large outputs must not fill the memory."""

# rows of older versions have no size
_size = func.coalesce(RESULTS.c.size, func.length(RESULTS.c.stdout) + func.length(RESULTS.c.stderr))
_RESULT_COLUMNS = (*RESULTS.c.keys(), "task_id", "sample_id", "labels", "created_at")
_CASE_COLUMNS = tuple(CASES.c.keys())
_result = (
    select(RESULTS, JOBS.c.task_id, JOBS.c.sample_id, JOBS.c.labels, JOBS.c.created_at)
    .join(JOBS, JOBS.c.id == RESULTS.c.job_id)
    .order_by(JOBS.c.batch_id, JOBS.c.seq)
)
_case = select(CASES).order_by(CASES.c.job_id, CASES.c.index)
_here = and_(JOBS.c.batch_id == given("of_batch"), JOBS.c.seq >= number("start"), JOBS.c.seq < number("end"))
_of_jobs = Statement(lambda postgres: _result.where(among(RESULTS.c.job_id, "ids", postgres)))
_cases_of_jobs = Statement(lambda postgres: _case.where(among(CASES.c.job_id, "ids", postgres)))
_of_span = Statement(lambda _: _result.where(_here))
_cases_of_span = Statement(lambda _: _case.where(CASES.c.job_id.in_(select(JOBS.c.id).where(_here))))
_sizes = Statement(lambda postgres: select(RESULTS.c.job_id, _size).where(among(RESULTS.c.job_id, "ids", postgres)))
_state = Statement(lambda _: select(JOBS.c.state).where(JOBS.c.id == given("job")))
_total = Statement(lambda _: select(BATCHES.c.total).where(BATCHES.c.id == given("of_batch")))
_claimed = Statement(
    lambda _: (
        select(JOBS.c.worker, func.count()).where(RUNNING, JOBS.c.batch_id == given("of_batch")).group_by(JOBS.c.worker)
    )
)
_verdicts = Statement(
    lambda _: (
        select(TALLIES.c.verdict, func.sum(TALLIES.c.count))
        .where(TALLIES.c.batch_id == given("of_batch"))
        .group_by(TALLIES.c.verdict)
    )
)
_counts = Statement(
    lambda postgres: (
        select(TALLIES.c.batch_id, func.sum(TALLIES.c.count))
        .where(among(TALLIES.c.batch_id, "ids", postgres))
        .group_by(TALLIES.c.batch_id)
    )
)
_measures = select(
    JOBS.c.task_id, JOBS.c.seq, JOBS.c.labels, RESULTS.c.job_id, RESULTS.c.verdict, RESULTS.c.cpu_seconds,
    RESULTS.c.wall_seconds, RESULTS.c.peak_memory_bytes, RESULTS.c.limit_share, RESULTS.c.rerun, RESULTS.c.shared_with,
    RESULTS.c.finished_at, RESULTS.c.worker, RESULTS.c.image_digest, RESULTS.c.comparator, RESULTS.c.exit_code,
    RESULTS.c.detail, JOBS.c.image,
).join(JOBS, JOBS.c.id == RESULTS.c.job_id)  # fmt: skip


class Waiting(NamedTuple):
    """Jobs of a batch that wait for the same reason."""

    fleet: str
    image: str | None
    """The image they need, in the form of `schemas.images`."""
    unread: bool
    """Whether the version of a worker could not read them."""
    jobs: int
    """How many there are."""


def batch(db: Connection, batch_id: str) -> Batch:
    """One batch. Raises `BatchNotFound`."""
    row = db.execute(select(BATCHES).where(BATCHES.c.id == batch_id)).one_or_none()
    if row is None:
        raise BatchNotFound(batch_id)
    return Batch(
        id=row.id, name=row.name, idempotency_key=row.idempotency_key, total=row.total,
        created_at=rows.moment(row.created_at), cancelled=row.cancelled_at is not None,
        about=json.loads(row.about) if row.about else {},
    )  # fmt: skip


def state(db: Connection, job_id: str) -> State:
    """The state of a job that callers see. Raises `JobNotFound`."""
    stored = _state.run(db, job=job_id).scalar()
    if stored is None:
        raise JobNotFound(job_id)
    return State.of(stored)


def progress(db: Connection, batch_id: str) -> Progress:
    """How many jobs of a batch are in which state, and how many have which verdict. Reads few rows, however large the
    batch is."""
    total = _total.run(db, of_batch=batch_id).scalar() or 0
    claimed = {str(worker): int(count) for worker, count in _claimed.run(db, of_batch=batch_id)}
    slots = registry.slots(db, list(claimed))
    verdicts = {Verdict(name): int(count) for name, count in _verdicts.run(db, of_batch=batch_id)}
    # A worker claims ahead: it runs no more jobs than it has slots, and the others that it has claimed wait.
    running = sum(min(count, slots.get(worker, count)) for worker, count in claimed.items())
    cancelled, done = verdicts.get(Verdict.CANCELLED, 0), sum(verdicts.values())
    return Progress(
        total=total, queued=max(0, total - done - running), running=running,
        finished=done - cancelled, cancelled=cancelled, verdicts=verdicts,
    )  # fmt: skip


def counts(db: Connection, batch_ids: Sequence[str]) -> dict[str, int]:
    """Batch id → how many of its jobs have a result. Batches without a result are left out."""
    found: dict[str, int] = {}
    for part in rows.parts(batch_ids):
        found |= {batch_id: int(count) for batch_id, count in _counts.run(db, ids=list(part))}
    return found


def done(db: Connection, batch_id: str) -> set[str]:
    """The ids of a batch's jobs that have a result."""
    return set(db.scalars(select(RESULTS.c.job_id).where(RESULTS.c.batch_id == batch_id)))


def portions(db: Connection, job_ids: Sequence[str]) -> list[list[str]]:
    """The ids of those of these jobs that have a result, in portions whose results fit into memory."""
    sizes = {str(job_id): int(size) for job_id, size in _sizes.run(db, ids=list(job_ids))}
    return list(_by_size([(job_id, sizes[job_id]) for job_id in job_ids if job_id in sizes]))


def portions_where(db: Connection, which: Any) -> list[list[int]]:
    """The places in their batch of the jobs with this SQL condition that have a result, in such portions."""
    query = select(JOBS.c.seq, _size).join(RESULTS, RESULTS.c.job_id == JOBS.c.id).where(which)
    return list(_by_size([(seq, int(size)) for seq, size in db.execute(query.order_by(JOBS.c.seq))]))


def results(db: Connection, job_ids: Sequence[str]) -> list[Result]:
    """The results of these jobs, in the order of submission."""
    return _results(_of_jobs.run(db, ids=list(job_ids)), _cases_of_jobs.run(db, ids=list(job_ids)))


def results_in(db: Connection, batch_id: str, start: int, end: int) -> list[Result]:
    """The results of the jobs of a batch from its `start`-th on and before its `end`-th, in the order of submission."""
    which = {"of_batch": batch_id, "start": start, "end": end}
    return _results(_of_span.run(db, **which), _cases_of_span.run(db, **which))


def measures(db: Connection, which: Any) -> Sequence[Any]:
    """What a report needs of the results of the jobs with this SQL condition, in the order of submission."""
    return db.execute(_measures.where(which).order_by(JOBS.c.seq)).all()


def specs(db: Connection, job_ids: Sequence[str]) -> dict[str, JobSpec]:
    """Job id → spec, without the jobs that this version cannot read."""
    found: dict[str, JobSpec] = {}
    for part in rows.parts(job_ids):
        for row in db.execute(select(JOBS.c.id, JOBS.c.spec).where(JOBS.c.id.in_(part))):
            with suppress(ValueError):
                found[row.id] = JobSpec.model_validate_json(row.spec)
    return found


def stored(db: Connection, batch_id: str, start: int, count: int) -> list[str]:
    """The specs of up to `count` jobs of a batch, as JSON, from its `start`-th on."""
    return list(db.scalars(select(JOBS.c.spec).where(span(batch_id, start, count)).order_by(JOBS.c.seq)))


def waiting(db: Connection, batch_id: str) -> list[Waiting]:
    """The jobs of a batch that are queued, or whose lease has expired, by reason. Reads the whole batch, so it is only
    for people who ask why nothing happens."""
    left_to_others = and_(JOBS.c.worker.like("version %"), JOBS.c.lease_until > clock())
    groups = (JOBS.c.fleet, JOBS.c.image, func.coalesce(left_to_others, False))
    expired = and_(JOBS.c.state == State.RUNNING, JOBS.c.lease_until < clock())
    query = select(*groups, func.count()).where(JOBS.c.batch_id == batch_id, or_(QUEUED, expired)).group_by(*groups)
    return [Waiting(fleet, image, bool(unread), count) for fleet, image, unread, count in db.execute(query)]


def _by_size(sizes: Sequence[tuple[T, int]]) -> Iterator[list[T]]:
    """Split results into portions of at most `AT_ONCE` characters. A larger result is a portion of its own."""
    portion: list[T] = []
    total = 0
    for each, size in sizes:
        if portion and total + size > AT_ONCE:
            yield portion
            portion, total = [], 0
        portion.append(each)
        total += size
    if portion:
        yield portion


def _results(found: Iterable[Any], found_cases: Iterable[Any]) -> list[Result]:
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for each in found_cases:
        case = rows.read(_CASE_COLUMNS, each)
        cases.setdefault(case["job_id"], []).append(case)
    read = [rows.read(_RESULT_COLUMNS, each) for each in found]
    return [rows.result_of(row, cases.get(row["job_id"], ())) for row in read]
