"""Submission: everything is validated, then the rows are committed, then a worker is woken. Jobs and batches are found
again by their ids."""

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
from worker.celery import UNREACHABLE, wake

PART = 5000
"""Jobs of a stream that are in memory, and in one transaction, at once."""
SEEN = 200_000
"""Jobs of a stream among which identical ones are found: samples of one problem are rarely further apart."""
NAME = 1000
"""Characters that a batch's name, or an idempotency key, may have."""


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
    pins: dict[str, str] = {}
    rest, start = iter(specs), 0
    unreachable: QueueUnavailable | None = None
    if (stored := store().batch(batch_id).total) != total:
        raise IdempotencyConflict(str(idempotency_key), batch_id, f"it has {stored} jobs, not {total}")
    while start < there and (part := list(islice(rest, min(PART, there - start)))):
        _compare(batch_id, str(idempotency_key), start, part)
        start += len(part)
    if there:  # whoever stored these may have died before it could wake a worker
        unreachable = _wake(batch_id, f"{there} jobs of batch {batch_id}", Priority.NORMAL)
    while part := _allowed(list(islice(rest, PART)), start):
        places = _images(part, batch_id, pins)
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
        if unreachable is None:
            unreachable = _wake(batch_id, f"{len(part)} jobs of batch {batch_id}", part[0].priority)
    if unreachable is not None:  # told at the end, when all jobs are stored
        raise unreachable
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
    """The same jobs. Raises `InvalidJob` if one asks for more than the operator allows; `start` is the first number."""
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
        if (count := store().batch(stored).total) != len(specs):
            raise IdempotencyConflict(str(key), stored, f"it has {count} jobs, not {len(specs)}")
        for start in range(0, len(specs), PART):
            _compare(stored, str(key), start, specs[start : start + PART])
        if not store().fill(stored, specs, digests, places):  # the first submission may have been interrupted
            raise IdempotencyConflict(str(key), stored, "they are just being stored")
    unreachable = _wake(stored, f"{len(specs)} jobs of batch {stored}", specs[0].priority)
    if unreachable is not None:
        raise unreachable
    return stored


def made_by() -> str:
    """What results depend on besides the jobs themselves: the default images, how programs are run, and our version."""
    now, workers = settings(), fleet()
    chosen = workers.settings(now)
    pinned = [workers.pin(name) for name in (chosen.image, chosen.code_image, chosen.notebook_image)]
    return images.made_by(" ".join(pinned), workers.profile(now))


def _images(specs: Sequence[JobSpec], batch_id: str | None = None, pins: dict[str, str] | None = None) -> list[str]:
    """The image of each job, pinned to the digest that it has on the workers now. A stream is submitted in parts, so
    its batch keeps the digests: a tag that is moved meanwhile does not change the image of the later parts."""
    workers, pins = fleet(), {} if pins is None else pins
    chosen = workers.settings(settings())
    names = [images.wanted(spec, chosen) for spec in specs]
    for name in set(names) - pins.keys():
        image = workers.pin(name)
        digest = images.digest_of(image)
        if batch_id is not None and digest is not None:
            image = images.pinned(name, store().pin(batch_id, name, digest))
        pins[name] = image
    return [pins[name] for name in names]


def _digests(specs: Sequence[JobSpec], places: Sequence[str]) -> list[str]:
    profile = fleet().profile(settings())
    return [spec.digest(images.made_by(place, profile)) for spec, place in zip(specs, places, strict=True)]


def _compare(batch_id: str, key: str, start: int, specs: Sequence[JobSpec]) -> None:
    """Raise `IdempotencyConflict` if the batch has other jobs than these from its `start`-th on."""
    stored = store().stored(batch_id, start, len(specs))
    for index, (spec, text) in enumerate(zip(specs, stored, strict=False), start):
        if spec.model_dump_json(exclude_defaults=True) == text:
            continue
        try:
            same = spec == JobSpec.model_validate_json(text)  # defaults may have changed since
        except ValueError:  # this version would not have written it
            same = False
        if not same:
            raise IdempotencyConflict(key, batch_id, f"job {index} differs")


def _name(field: str, value: str | None) -> None:
    """Refuse a value that is too long, or that a database cannot store."""
    if value is None:
        return
    if "\0" in value or len(value) > NAME:
        raise InvalidJob(f"{field}: it may have at most {NAME} characters, and no NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidJob(f"{field}: it contains an unpaired surrogate, which is not valid text") from None


def _new_id() -> str:
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(5)}"  # sorts by time


def _wake(batch_id: str, what: str, priority: Priority) -> QueueUnavailable | None:
    """Wake a worker. Returns the error to raise if Redis does not answer."""
    try:
        wake(bell().client, what, priority)
    except UNREACHABLE as error:
        unavailable = QueueUnavailable(batch_id, str(error))
        unavailable.__cause__ = error
        return unavailable
    return None
