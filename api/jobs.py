"""Submission: everything is validated, then the rows are committed, then Redis is told. And the way back from an id."""

import secrets
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from api.connections import store
from api.handles import BatchHandle, Job
from schemas.errors import InvalidJob, QueueUnavailable
from schemas.job import JobSpec
from schemas.rows import job_id
from schemas.settings import settings
from worker.celery import UNREACHABLE, chunk_size, publish

AT_ONCE = 20_000
"""Jobs that are announced again at once; the workers' reconciler does the rest."""


def submit_job(spec: JobSpec | Mapping[str, Any] | None = None, /, **fields: Any) -> Job:
    """Submit one job, given as a `JobSpec` or by its fields; returns as soon as it is stored and queued."""
    if spec is not None and fields:
        raise InvalidJob(f"{next(iter(fields))}: give a JobSpec or its fields, not both")
    batch_id = _submit([_spec(fields if spec is None else spec)], None, None)
    return Job(job_id(batch_id, 0))


def submit_batch(
    jobs: Iterable[JobSpec | Mapping[str, Any]], *, name: str | None = None, idempotency_key: str | None = None
) -> BatchHandle:
    """Submit many jobs, all or none of them. With a key that was used before, this is the batch it was used for."""
    specs: list[JobSpec] = []
    for index, job in enumerate(jobs):
        try:
            specs.append(_spec(job))
        except InvalidJob as error:
            raise InvalidJob(f"job {index}: {error}") from None
    if not specs:
        raise InvalidJob("jobs: a batch needs at least one")
    return BatchHandle(_submit(specs, name, idempotency_key))


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


def _submit(specs: list[JobSpec], name: str | None, key: str | None) -> str:
    batch_id = f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(5)}"  # sorts by time
    stored = store().add_batch(batch_id, specs, name, key)
    if stored == batch_id:
        jobs = [(job_id(batch_id, seq), str(spec.priority)) for seq, spec in enumerate(specs)]
    else:  # what its first submitter, who may have died half way, did not announce
        jobs = store().unannounced(grace=-1, stale=None, limit=sys.maxsize, batch_id=stored)
    try:
        _announce(jobs)
    except UNREACHABLE as error:
        raise QueueUnavailable(stored, str(error)) from error
    return stored


def _announce(jobs: Sequence[tuple[str, str]]) -> None:
    if not jobs:
        return
    now = settings()
    jobs = sorted(jobs, key=lambda job: job[1])  # one priority to a message: mixed ones would make many small messages
    publish(jobs, chunk_size(len(jobs), now.slots, now.chunk))
    store().mark_published([job_id for job_id, _ in jobs])
