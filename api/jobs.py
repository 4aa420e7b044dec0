"""Submission: everything is validated, then the rows are committed, then the workers are woken. And the way back from
an id."""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from api.connections import bell, fleet, store
from api.handles import BatchHandle, Job
from schemas import ceilings, images, twins
from schemas.errors import IdempotencyConflict, InvalidJob, QueueUnavailable
from schemas.job import JobSpec
from schemas.rows import job_id
from schemas.settings import settings
from schemas.verdict import Priority
from schemas.version import version
from worker.celery import UNREACHABLE, wake

PART = 5000
"""Jobs of a stream that are in memory, and in one transaction, at once."""
SEEN = 200_000
"""Jobs of a stream among which identical ones are found: samples of one problem are rarely further apart."""
NAME = 1000
"""Characters of a batch's name, or of an idempotency key."""


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
    _name("name", name)
    _name("idempotency_key", idempotency_key)
    batch_id, there, turn = store().open_batch(_new_id(), total, name, idempotency_key, about or {})
    seen: dict[str, str] = {}
    rest, start = iter(specs), 0
    if (stored := store().batch(batch_id).total) != total:
        raise IdempotencyConflict(str(idempotency_key), batch_id, f"it has {stored} of them")
    if there:
        while start < there:
            part = list(islice(rest, min(PART, there - start)))
            _compare(batch_id, str(idempotency_key), start, part)
            start += len(part)
        _wake(batch_id, "what was stored before")
    while part := _allowed(list(islice(rest, PART)), start):
        places = _images(part)
        digests, leaders = None, {}
        if dedup:
            digests = _digests(part, places)
            if len(seen) > SEEN:
                seen.clear()
            if cache:
                seen |= store().known([digest for digest in set(digests) if digest not in seen])
            leaders = twins.leaders(batch_id, start, digests, seen)
        store().add_jobs(batch_id, start, part, turn, digests, leaders, places, first=there)
        start += len(part)
        _wake(batch_id, f"{len(part)} jobs of batch {batch_id}", part[0].priority)
    return BatchHandle(batch_id)


def get_job(job_id: str) -> Job:
    """The handle of a job submitted earlier, here or elsewhere; `JobNotFound` if there is none."""
    store().state(job_id)
    return Job(job_id)


def get_batch(batch_id: str) -> BatchHandle:
    """The handle of a batch submitted earlier, here or elsewhere; `BatchNotFound` if there is none."""
    store().batch(batch_id)
    return BatchHandle(batch_id)


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
    _name("name", name)
    _name("idempotency_key", key)
    batch_id, places = _new_id(), _images(specs)
    digests = _digests(specs, places) if dedup else None
    stored = store().add_batch(batch_id, specs, name, key, digests, places)
    if stored != batch_id:
        if store().batch(stored).total != len(specs):
            raise IdempotencyConflict(str(key), stored, f"it has {store().batch(stored).total} of them")
        for start in range(0, len(specs), PART):
            _compare(stored, str(key), start, specs[start : start + PART])
    _wake(stored, f"{len(specs)} jobs of batch {stored}", specs[0].priority)
    return stored


def made_by() -> str:
    """What decides results besides the jobs themselves: the images of jobs that name none, how programs are run, and
    our own version."""
    now, workers = settings(), fleet()
    chosen = workers.settings(now)
    pinned = [workers.pin(name) for name in (chosen.image, chosen.code_image, chosen.notebook_image)]
    return " ".join([*pinned, workers.profile(now), version()])


def _images(specs: Sequence[JobSpec]) -> list[str]:
    """The image of each job, with the digest that it has on the workers now: whoever runs the job, and whenever, takes
    the same one."""
    workers = fleet()
    chosen = workers.settings(settings())
    pinned: dict[str, str] = {}
    names = [images.wanted(spec, chosen) for spec in specs]
    for name in set(names):
        pinned[name] = workers.pin(name)
    return [pinned[name] for name in names]


def _digests(specs: Sequence[JobSpec], places: Sequence[str]) -> list[str]:
    profile = fleet().profile(settings())
    return [spec.digest(images.made_by(place, profile)) for spec, place in zip(specs, places, strict=True)]


def _compare(batch_id: str, key: str, start: int, specs: Sequence[JobSpec]) -> None:
    """Raise `IdempotencyConflict` unless these are the jobs of the batch from its `start`-th on."""
    stored = store().stored(batch_id, start, len(specs))
    for index, (spec, text) in enumerate(zip(specs, stored, strict=False), start):
        if spec.model_dump_json(exclude_defaults=True) != text and spec != JobSpec.model_validate_json(text):
            raise IdempotencyConflict(key, batch_id, f"job {index} differs")


def _name(field: str, value: str | None) -> None:
    """Refuse what no database takes."""
    if value is None:
        return
    if "\0" in value or len(value) > NAME:
        raise InvalidJob(f"{field}: at most {NAME} characters, and no NUL among them")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidJob(f"{field}: it contains half of a surrogate pair, which is not text") from None


def _new_id() -> str:
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(5)}"  # sorts by time


def _wake(batch_id: str, what: str, priority: Priority = Priority.NORMAL) -> None:
    try:
        wake(bell().client, what, priority)
    except UNREACHABLE as error:
        raise QueueUnavailable(batch_id, str(error)) from error
