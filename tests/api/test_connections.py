"""What is opened once in a process, and how it fails."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import exc

from evalpool.api import connections as module
from evalpool.api import get_job, submit_job
from evalpool.api.jobs import submissions
from evalpool.schemas import DatabaseUnavailable
from evalpool.schemas.entries import Single
from evalpool.schemas.fleet import Fleet
from evalpool.schemas.store import Store
from tests.conftest import PATIENCE, eventually
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


@pytest.mark.parametrize(
    ("kind", "away"), [(exc.OperationalError, True), (exc.InterfaceError, True), (exc.DataError, False)]
)
def test_only_an_absent_database_fails_all_submissions_of_a_group_at_once(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch, kind: type[exc.DBAPIError], away: bool
) -> None:
    groups: list[int] = []
    go = threading.Event()

    def fail(_store: Store, singles: Sequence[Single]) -> None:
        groups.append(len(singles))
        assert go.wait(PATIENCE)
        with module._translated():
            raise kind("INSERT", {}, Exception("it failed"))

    monkeypatch.setattr(Store, "add_singles", fail)
    with ThreadPoolExecutor(4) as threads:
        submitted = [threads.submit(submit_job, code="x") for _ in range(4)]
        eventually(lambda: len(submissions()._waiting) == 4)
        go.set()
        for each in submitted:
            with pytest.raises(DatabaseUnavailable):
                each.result(PATIENCE)
    assert groups == ([1, 3] if away else [1, 3, 1, 1, 1])
