"""What is opened once in a process, and how it fails."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from evalpool.api import connections as module
from evalpool.api import get_job, submit_job
from evalpool.schemas import DatabaseUnavailable
from evalpool.schemas.fleet import Fleet
from evalpool.schemas.store import Store
from tests.conftest import PATIENCE
from tests.faults.servers import PostgresServer
from tests.schemas.conftest import postgres  # noqa: F401 - a fixture

pytestmark = pytest.mark.redis


def test_nobody_waits_for_the_query_that_lists_the_workers(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event loops open the ear in their own thread."""
    asked, go = threading.Event(), threading.Event()

    def slow(*_: object) -> Fleet:
        asked.set()
        assert go.wait(PATIENCE)
        return Fleet()

    monkeypatch.setattr(Store, "fleet", slow)
    with ThreadPoolExecutor(2) as threads:
        listing = threads.submit(module.fleet)
        try:
            assert asked.wait(PATIENCE)
            threads.submit(module.ear).result(10)
        finally:
            go.set()
        assert listing.result(PATIENCE) == Fleet()


def test_a_failure_of_postgresql_is_raised_as_an_error_of_ours(
    redis_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: PostgresServer = request.getfixturevalue("postgres")
    server.execute("CREATE DATABASE failing")
    url = server.url("failing").replace("postgresql://", "postgresql+psycopg://", 1)
    monkeypatch.setenv("EVALPOOL_DATABASE_URL", url)
    job = submit_job(code="x")
    with module.store().database.write() as db:
        db.exec_driver_sql("ALTER TABLE jobs RENAME TO jobs_of_yesterday")
    for ask in (job.state, lambda: get_job(job.id)):
        with pytest.raises(DatabaseUnavailable, match="jobs"):
            ask()
    module.store().database.close()
