"""A worker that only says what came out."""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

import pytest

from schemas import Metrics, Result, Verdict
from schemas.rows import batch_of
from schemas.store import Store
from worker.bell import Bell

Finish = Callable[..., None]


@pytest.fixture
def finish(store: Store, redis_url: str) -> Iterator[Finish]:
    """Records results for jobs and rings for them, as a worker does; `ring=False` leaves the bell out."""
    bell = Bell(redis_url)

    def _finish(job_ids: Iterable[str], verdict: Verdict = Verdict.PASSED, *, ring: bool = True) -> None:
        ids = list(job_ids)
        record(store, ids, verdict)
        if ring:
            bell.ring(ids)

    yield _finish
    bell.close()


def record(store: Store, job_ids: Iterable[str], verdict: Verdict = Verdict.PASSED, **fields: object) -> None:
    """Commit results of this verdict."""
    now = datetime.now(UTC)
    used = Metrics(cpu_seconds=0.5, wall_seconds=1.0, peak_memory_bytes=1 << 20)
    given = {"detail": f"it was {verdict.value}", "metrics": used, "created_at": now, "finished_at": now} | fields
    store.record([Result(job_id=each, batch_id=batch_of(each), verdict=verdict, **given) for each in job_ids])


def rows(store: Store) -> int:
    """How many jobs and batches are stored."""
    with store.database.read() as db:
        return sum(db.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one() for table in ("batches", "jobs"))
