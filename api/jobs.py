"""Submission: everything is validated, then the rows are committed, then Redis is told. And the way back from an id."""

import secrets
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from api.connections import store
from api.handles import BatchHandle, Job
from api.version import version
from schemas import ceilings, twins
from schemas.errors import InvalidJob, QueueUnavailable
from schemas.job import JobSpec
from schemas.rows import job_id
from schemas.settings import settings
from worker.celery import UNREACHABLE, chunk_size, publish

AT_ONCE = 20_000
"""Jobs that are announced again at once; the workers' reconciler does the rest."""
PART = 5000
"""Jobs of a stream that are in memory, and in one transaction, at once."""
SEEN = 200_000
"""Jobs of a stream among which identical ones are found: samples of one problem are rarely further apart."""


def submit_job(spec: JobSpec | Mapping[str, Any] | None = None, /, **fields: Any) -> Job:
    """Submit one job, given as a `JobSpec` or by its fields; returns as soon as it is stored and queued."""
    if spec is not None and fields:
        raise InvalidJob(f"{next(iter(fields))}: give a JobSpec or its fields, not both")
    given = _spec(fields if spec is None else spec)
    ceilings.check(given.limits, settings())
    batch_id = _submit([given], None, None)
    return Job(job_id(batch_id, 0))


def submit_batch(
    jobs: Iterable[JobSpec | Mapping[str, Any]],
    *,
    name: str | None = None,
    idempotency_key: str | None = None,
    dedup: bool = False,
) -> BatchHandle:
    """Submit many jobs, all or none of them. With a key that was used before, this is the batch it was used for. With
    `dedup`, identical jobs are run once and share the result."""
    specs: list[JobSpec] = []
    for index, job in enumerate(jobs):
        try:
            specs.append(_spec(job))
        except InvalidJob as error:
            raise InvalidJob(f"job {index}: {error}") from None
    if not specs:
        raise InvalidJob("jobs: a batch needs at least one")
    return BatchHandle(_submit(_allowed(specs), name, idempotency_key, dedup))


def submit_stream(
    specs: Iterable[JobSpec],
    total: int,
    *,
    name: str | None = None,
    idempotency_key: str | None = None,
    about: Mapping[str, Any] | None = None,
    dedup: bool = False,
    cache: bool = False,
) -> BatchHandle:
    """Submit jobs that do not fit in memory, in parts that are run while the next ones are read. With a key that was
    used before, go on where that submission ended.

    `dedup` lets identical jobs share a result; `cache`, with those of earlier batches too.
    """
    batch_id, there, turn = store().open_batch(_new_id(), total, name, idempotency_key, about or {})
    if there:
        _announce_batch(batch_id, store().unannounced(grace=-1, stale=None, limit=sys.maxsize, batch_id=batch_id))
    seen: dict[str, str] = {}
    made = made_by()
    rest, start = islice(specs, there, None), there
    while part := _allowed(list(islice(rest, PART)), start):
        digests, leaders = None, {}
        if dedup:
            digests = [spec.digest(made) for spec in part]
            if len(seen) > SEEN:
                seen.clear()
            if cache:
                seen |= store().known([digest for digest in set(digests) if digest not in seen])
            leaders = twins.leaders(batch_id, start, digests, seen)
        store().add_jobs(batch_id, start, part, turn - there, digests, leaders)
        places = [(start + place, spec) for place, spec in enumerate(part) if start + place not in leaders]
        _announce_batch(batch_id, [(job_id(batch_id, seq), str(spec.priority)) for seq, spec in places])
        start += len(part)
    return BatchHandle(batch_id)


def get_job(job_id: str) -> Job:
    """The handle of a job submitted earlier, here or elsewhere; `JobNotFound` if there is none."""
    store().state(job_id)
    return Job(job_id)


def get_batch(batch_id: str) -> BatchHandle:
    """The handle of a batch submitted earlier, here or elsewhere; `BatchNotFound` if there is none."""
    store().batch(batch_id)
    return BatchHandle(batch_id)


def republish() -> None:
    """Tell a Redis that has just been started of the jobs that wait, before a reconciler has to notice."""
    waiting = store().unannounced(grace=0, stale=0, limit=AT_ONCE)
    if waiting:
        _announce(waiting)


def _spec(job: object) -> JobSpec:
    if isinstance(job, JobSpec):
        return job
    if isinstance(job, Mapping):
        return JobSpec(**{str(name): value for name, value in job.items()})
    raise InvalidJob(f"a job is a JobSpec or a mapping of its fields, not {type(job).__name__}")


def _allowed(specs: list[JobSpec], start: int = 0) -> list[JobSpec]:
    """These jobs, if none of them asks for more than the operator allows; they are numbered from `start`."""
    now = settings()
    for index, spec in enumerate(specs, start):
        try:
            ceilings.check(spec.limits, now)
        except InvalidJob as error:
            raise InvalidJob(f"job {index}: {error}") from None
    return specs


def _submit(specs: list[JobSpec], name: str | None, key: str | None, dedup: bool = False) -> str:
    batch_id = _new_id()
    made = made_by()
    digests = [spec.digest(made) for spec in specs] if dedup else None
    stored = store().add_batch(batch_id, specs, name, key, digests)
    if stored == batch_id and not dedup:
        jobs = [(job_id(batch_id, seq), str(spec.priority)) for seq, spec in enumerate(specs)]
    else:  # all but twins; or what the first submitter, who may have died half way, did not announce
        jobs = store().unannounced(grace=-1, stale=None, limit=sys.maxsize, batch_id=stored)
    _announce_batch(stored, jobs)
    return stored


def made_by() -> str:
    """What decides results besides the jobs themselves: images that jobs need not name, and our own version."""
    return f"{settings().image} {settings().code_image} {version()}"


def _new_id() -> str:
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(5)}"  # sorts by time


def _announce_batch(batch_id: str, jobs: Sequence[tuple[str, str]]) -> None:
    try:
        _announce(jobs)
    except UNREACHABLE as error:
        raise QueueUnavailable(batch_id, str(error)) from error


def _announce(jobs: Sequence[tuple[str, str]]) -> None:
    if not jobs:
        return
    now = settings()
    jobs = sorted(jobs, key=lambda job: job[1])  # one priority to a message: mixed ones would make many small messages
    publish(jobs, chunk_size(len(jobs), now.slots, now.chunk))
    store().mark_published([job_id for job_id, _ in jobs])
