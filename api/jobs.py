"""Submits jobs: everything is validated, then the rows are committed, then a worker is woken. Jobs and batches are
found again by their ids."""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count, islice
from typing import Any, Literal, Required, TypedDict, TypeVar, Unpack, overload

from sqlalchemy.exc import IntegrityError

from evalpool.api.combiner import Combiner
from evalpool.api.connections import TOGETHER, away, bell, ear, fleet, store
from evalpool.api.ear import origin
from evalpool.api.handles import BatchHandle, Job
from evalpool.api.receiver import in_background
from evalpool.schemas import ceilings, images
from evalpool.schemas.dedup import find_leaders
from evalpool.schemas.entries import Single
from evalpool.schemas.errors import (
    BatchNotFound,
    EvalpoolError,
    IdempotencyConflict,
    InvalidJob,
    JobNotFound,
    NotAJob,
    QueueUnavailable,
)
from evalpool.schemas.job import Case, JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.rows import job_id
from evalpool.schemas.settings import settings
from evalpool.schemas.store import Store
from evalpool.schemas.verdict import Priority
from evalpool.worker.queue.notify import Bell
from evalpool.worker.queue.publish import UNREACHABLE, wake

PART = 5000
"""Jobs of a stream that are in memory, and in one transaction, at once."""
SEEN = 200_000
"""Jobs of a stream among which identical ones (twins) are found. Samples of one problem are rarely further apart."""
NAME = 1000
"""Characters that a batch's name, or an idempotency key, may have."""

H = TypeVar("H", Job, BatchHandle)

_numbers: dict[int, Iterator[int]] = {}
"""What numbers the batches of this process. A random number in each id would soon be drawn twice in a millisecond."""


class JobFields(TypedDict, total=False):
    """The fields of `JobSpec`, which explains them, as keyword arguments."""

    code: Required[str]
    tool: str
    language: str
    stdin: str
    args: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, str]
    check: str | None
    cases: Sequence[Case | Mapping[str, Any]]
    entry_point: str | None
    checker: str | None
    stop_early: bool
    limits: Limits | Mapping[str, Any]
    image: str | None
    isolation: Literal["warm", "fresh"]
    task_id: str | int | None
    sample_id: str | int | None
    labels: Mapping[str, str | int | float | bool | None] | None
    priority: Priority | Literal["high", "normal", "low"]


@overload
def submit_job(spec: JobSpec | Mapping[str, Any], /) -> Job: ...
@overload
def submit_job(**fields: Unpack[JobFields]) -> Job: ...
def submit_job(spec: JobSpec | Mapping[str, Any] | None = None, /, **fields: Any) -> Job:
    """Submit one job, given as a `JobSpec` or by its fields. Returns as soon as the job is stored and queued."""
    return _submit_one(spec, fields)


def _submit_one(spec: JobSpec | Mapping[str, Any] | None, fields: Mapping[str, Any]) -> Job:
    if spec is not None and fields:
        raise InvalidJob(f"{next(iter(fields))}: give a JobSpec or its fields, not both")
    try:
        given = _spec(fields if spec is None else spec)
    except NotAJob as error:
        raise InvalidJob(f"job: {error}; to submit a program, write code=…") from None
    ceilings.check(given.limits, settings())
    batch_id, (place,) = _new_id(), _images([given])
    rings = ear().expect(batch_id)
    single = Single(batch_id, given, place)
    with _whole(batch_id, None):
        submissions().call(single)
        unreachable = wakes().call(single)
    if unreachable is not None:
        raise unreachable
    return Job(job_id(batch_id, 0), rings)


def submit_batch(
    jobs: Iterable[JobSpec | Mapping[str, Any]],
    *,
    name: str | None = None,
    idempotency_key: str | None = None,
    dedup: bool = False,
) -> BatchHandle:
    """Submit many jobs, all or none of them. With an idempotency key that was used before, return the batch of that
    submission. With `dedup`, identical jobs are run once and share the result."""
    specs: list[JobSpec] = []
    for index, job in enumerate(_several(jobs)):
        try:
            specs.append(_spec(job))
        except InvalidJob as error:
            raise InvalidJob(f"job {index}: {error}") from None
    if not specs:
        raise InvalidJob("jobs: a batch needs at least one job")
    return BatchHandle(_submit(_allowed(specs), name, idempotency_key, dedup))


@overload
async def submit_job_async(spec: JobSpec | Mapping[str, Any], /) -> Job: ...
@overload
async def submit_job_async(**fields: Unpack[JobFields]) -> Job: ...
async def submit_job_async(spec: JobSpec | Mapping[str, Any] | None = None, /, **fields: Any) -> Job:
    """Submit one job like `submit_job`, without blocking the event loop. If the call is cancelled, so is the job."""
    return await _aside(lambda: _submit_one(spec, fields))


async def submit_batch_async(
    jobs: Iterable[JobSpec | Mapping[str, Any]],
    *,
    name: str | None = None,
    idempotency_key: str | None = None,
    dedup: bool = False,
) -> BatchHandle:
    """Submit many jobs like `submit_batch`, without blocking the event loop. If the call is cancelled, so are its jobs;
    with an idempotency key they stay, since the next submission finds them."""

    def submit() -> BatchHandle:
        return submit_batch(jobs, name=name, idempotency_key=idempotency_key, dedup=dedup)

    return await _aside(submit, undo=idempotency_key is None)


async def _aside(submit: Callable[[], H], *, undo: bool = True) -> H:
    """Submit in a thread. Jobs that are stored after the caller was cancelled are cancelled, as nobody knows their
    ids."""
    submitted = in_background(submit)
    try:
        return await asyncio.wrap_future(submitted)
    except asyncio.CancelledError:
        if undo and not submitted.cancelled():
            submitted.add_done_callback(lambda done: done.exception() or in_background(done.result().cancel))
        raise


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
    used before, continue where that submission stopped.

    With `dedup`, identical jobs share a result. With `cache`, they also share results of earlier batches.
    """
    _name("name", name)
    _name("idempotency_key", idempotency_key)
    batch_id, there, turn = store().open_batch(_new_id(), total, name, idempotency_key, about or {})
    seen: dict[str, str] = {}
    pins: dict[str, str] = {}
    rest = iter(specs)
    unreachable: QueueUnavailable | None = None
    if (stored := store().batch(batch_id).total) != total:
        raise IdempotencyConflict(str(idempotency_key), batch_id, f"it has {stored} jobs, not {total}")
    start = _skip(rest, there, batch_id, str(idempotency_key))
    if there:  # the process that stored these may have died before it woke a worker, and its fleet with it
        store().adopt(batch_id)
        unreachable = _wake(batch_id, f"{there} jobs of batch {batch_id}", Priority.NORMAL)
    with _whole(batch_id, idempotency_key):
        while part := _allowed(list(islice(rest, PART)), start):
            places = _images(part, batch_id, pins)
            digests = _digests(part, places) if dedup else None
            leaders = _leaders(batch_id, start, digests, seen, cache) if digests else {}
            store().add_jobs(batch_id, start, part, turn, digests, leaders, places, first=there)
            start += len(part)
            if unreachable is None:
                unreachable = _wake(batch_id, f"{len(part)} jobs of batch {batch_id}", part[0].priority)
    if unreachable is not None:  # raised at the end, when all jobs are stored
        raise unreachable
    return BatchHandle(batch_id)


def _skip(specs: Iterator[JobSpec], count: int, batch_id: str, key: str) -> int:
    """Skip the jobs that are stored already, and return how many there were. Raises `IdempotencyConflict` if they
    differ from the stored ones."""
    start = 0
    while start < count and (part := list(islice(specs, min(PART, count - start)))):
        _compare(batch_id, key, start, part)
        start += len(part)
    return start


def _leaders(batch_id: str, start: int, digests: list[str], seen: dict[str, str], cache: bool) -> dict[int, str]:
    """Return the leaders of twins: place in the batch → id of the identical job whose result is shared."""
    if len(seen) > SEEN:
        seen.clear()
    if cache:
        seen |= store().known([digest for digest in set(digests) if digest not in seen])
    return find_leaders(batch_id, start, digests, seen)


@contextmanager
def _whole(batch_id: str, key: str | None) -> Iterator[None]:
    """Cancel a batch whose submission is interrupted. With an idempotency key it stays, as the same submission can then
    be repeated."""
    try:
        yield
    except BaseException as error:
        # After an `IntegrityError`, the batch of this id is not ours.
        if key is None and not isinstance(error.__cause__, IntegrityError):
            with suppress(EvalpoolError):  # it may not be stored yet, or the database may be away
                store().cancel(batch_id=batch_id)
        raise


def get_job(job_id: str) -> Job:
    """Return the handle of a job that was submitted earlier, here or elsewhere. Raises `JobNotFound`."""
    if not _storable(_id("job_id", "job", job_id)):
        raise JobNotFound(job_id)
    store().state(job_id)
    return Job(job_id)


def get_batch(batch_id: str) -> BatchHandle:
    """Return the handle of a batch that was submitted earlier, here or elsewhere. Raises `BatchNotFound`."""
    if not _storable(_id("batch_id", "batch", batch_id)):
        raise BatchNotFound(batch_id)
    store().batch(batch_id)
    return BatchHandle(batch_id)


def _spec(job: object) -> JobSpec:
    if isinstance(job, JobSpec):
        return job
    if isinstance(job, Mapping):
        return JobSpec(**{str(name): value for name, value in job.items()})
    raise NotAJob(f"it must be a JobSpec or a mapping of its fields, not {type(job).__name__}")


def _several(jobs: object) -> Iterable[Any]:
    """Return the jobs as they were given. A single job is refused, since iterating over it would yield its fields."""
    if isinstance(jobs, JobSpec | Mapping):
        raise InvalidJob("jobs: it must be a list of jobs; submit_job takes a single one")
    if isinstance(jobs, str | bytes) or not isinstance(jobs, Iterable):
        raise InvalidJob(f"jobs: it must be a list of jobs, not {type(jobs).__name__}")
    return jobs


def _id(field: str, of: str, given: object) -> str:
    """Return the id. Raises `InvalidJob` if it is not text."""
    if isinstance(given, str):
        return given
    hint = "; a handle has its id in .id" if isinstance(given, Job | BatchHandle) else ""
    raise InvalidJob(f"{field}: it must be the id of a {of}, not {type(given).__name__}{hint}")


def _allowed(specs: list[JobSpec], start: int = 0) -> list[JobSpec]:
    """Return the same jobs. Raises `InvalidJob` if one asks for more than the operator allows; the first has the number
    `start`."""
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
    with _whole(batch_id, key):
        stored = store().add_batch(batch_id, specs, name, key, digests, places)
    if stored != batch_id:
        if (count := store().batch(stored).total) != len(specs):
            raise IdempotencyConflict(str(key), stored, f"it has {count} jobs, not {len(specs)}")
        for start in range(0, len(specs), PART):
            _compare(stored, str(key), start, specs[start : start + PART])
        if not store().fill(stored, specs, digests, places):  # the first submission may have been interrupted
            raise IdempotencyConflict(str(key), stored, "other jobs are being stored under it at this moment")
    unreachable = _wake(stored, f"{len(specs)} jobs of batch {stored}", specs[0].priority)
    if unreachable is not None:
        raise unreachable
    return stored


def made_by() -> str:
    """Return what results depend on besides the jobs: the default images, how programs are run, and our version."""
    now, workers = settings(), fleet()
    chosen = workers.settings(now)
    pinned = [workers.pin(name) for name in images.defaults(chosen).values()]
    return images.made_by(" ".join(pinned), workers.profile(now))


def _images(specs: Sequence[JobSpec], batch_id: str | None = None, pins: dict[str, str] | None = None) -> list[str]:
    """Return the image of each job, pinned to the digest that it has on the workers now. A stream is submitted in
    parts, so its batch keeps the digests: a tag that is moved meanwhile does not change the image of later parts."""
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
    """Raise `IdempotencyConflict` if the jobs of the batch, from place `start` on, differ from these."""
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


def _name(field: str, value: object) -> None:
    """Raise `InvalidJob` for a value that is too long, or that a database cannot store."""
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidJob(f"{field}: it must be text, not {type(value).__name__}")
    if len(value) > NAME or not _storable(value):
        raise InvalidJob(f"{field}: it may have at most {NAME} characters, no NUL and no unpaired surrogate")


def _storable(text: str) -> bool:
    """Whether every database can store this text."""
    try:
        return "\0" not in text and bool(text.encode() or True)
    except UnicodeEncodeError:
        return False


def _new_id() -> str:
    # It sorts by time, and says on which channel the bell rings for it (see `worker.queue.notify`).
    number = next(_numbers.setdefault(os.getpid(), count(secrets.randbits(24)))) & 0xFFFFFF
    return f"{time.time_ns() // 1_000_000:012x}{origin()}{number:06x}"


def submissions() -> Combiner[Single, None]:
    """What stores single jobs. Threads that submit at the same time share a transaction."""
    return _submissions(store())


def wakes() -> Combiner[Single, QueueUnavailable | None]:
    """What wakes a worker for stored single jobs. An answer is the error to raise if Redis does not answer: that takes
    seconds, in which others go on storing jobs."""
    return _wakes(bell())


@cache
def _submissions(ledger: Store) -> Combiner[Single, None]:
    def submit(singles: Sequence[Single]) -> list[None]:
        ledger.add_singles(singles)
        return [None] * len(singles)

    return Combiner(submit, TOGETHER, away)


@cache
def _wakes(ringing: Bell) -> Combiner[Single, QueueUnavailable | None]:
    def wake_for(singles: Sequence[Single]) -> list[QueueUnavailable | None]:
        urgent = min((single.spec.priority for single in singles), key=list(Priority).index)
        more = f" and {len(singles) - 1} others" if len(singles) > 1 else ""
        try:
            wake(ringing.client, f"1 job of batch {singles[0].batch_id}{more}", urgent)
        except UNREACHABLE as error:
            return [_unavailable(single.batch_id, error) for single in singles]
        return [None] * len(singles)

    return Combiner(wake_for, TOGETHER)


def _wake(batch_id: str, what: str, priority: Priority) -> QueueUnavailable | None:
    """Wake a worker. Returns the error to raise if Redis does not answer."""
    try:
        wake(bell().client, what, priority)
    except UNREACHABLE as error:
        return _unavailable(batch_id, error)
    return None


def _unavailable(batch_id: str, error: BaseException) -> QueueUnavailable:
    unavailable = QueueUnavailable(batch_id, str(error))
    unavailable.__cause__ = error
    return unavailable
