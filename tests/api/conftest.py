"""A stand-in for a worker, which only records results."""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

import pytest

from evalpool.schemas import Metrics, Result, Verdict
from evalpool.schemas.rows import batch_of
from evalpool.schemas.store import Store
from evalpool.worker.queue.notify import Bell

Finish = Callable[..., None]


@pytest.fixture
def finish(store: Store, redis_url: str) -> Iterator[Finish]:
    """Return a function that records results and rings the bell, as a worker does; `ring=False` leaves the bell out."""
    bell = Bell(redis_url)

    def _finish(job_ids: Iterable[str], verdict: Verdict = Verdict.PASSED, *, ring: bool = True) -> None:
        ids = list(job_ids)
        record(store, ids, verdict)
        if ring:
            bell.ring(ids)

    yield _finish
    bell.close()


def record(store: Store, job_ids: Iterable[str], verdict: Verdict = Verdict.PASSED, **fields: object) -> None:
    """Commit results with this verdict."""
    now = datetime.now(UTC)
    used = Metrics(cpu_seconds=0.5, wall_seconds=1.0, peak_memory_bytes=1 << 20)
    given = {"detail": f"it was {verdict.value}", "metrics": used, "created_at": now, "finished_at": now} | fields
    store.record([Result(job_id=each, batch_id=batch_of(each), verdict=verdict, **given) for each in job_ids])


def rows(store: Store) -> int:
    """Return the number of stored jobs and batches."""
    with store.database.read() as db:
        return sum(db.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one() for table in ("batches", "jobs"))
