"""F21 to F24: a ledger that is locked, restarted, away, or of another version."""

import signal
import sqlite3
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.faults.fleet import Fleet
from tests.faults.jobs import mixed, quick, sleepers
from tests.faults.servers import PostgresServer, RedisServer

POSTGRES = pytest.mark.parametrize("ledger", ["postgresql"], indirect=True)


def test_f21_sqlite_is_locked_by_another_writer(fleet: Fleet, tmp_path: Path) -> None:
    """The database is locked for 5 seconds instead of 30, which is longer than a lease, so that every lease expires."""
    first, second = fleet.start(ready=False), fleet.start(ready=False)
    first.wait_ready(), second.wait_ready()
    fleet.submit(sleepers(20, 0.3))
    fleet.wait_done(5)
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None, timeout=30)
    other.execute("BEGIN IMMEDIATE")
    time.sleep(5)
    other.execute("ROLLBACK")
    other.close()
    fleet.finish()
    assert fleet.workers == [first, second]


@POSTGRES
def test_f22_postgresql_is_restarted_and_its_sessions_end(fleet: Fleet, postgres: PostgresServer) -> None:
    """The server crashes and recovers, which is what a failover looks like; then every session is ended several
    times."""
    worker = fleet.start()
    fleet.submit(mixed(60, seconds=0.1))
    fleet.wait_done(10)
    postgres.stop(signal.SIGQUIT)
    postgres.start()
    fleet.store.database.close()  # this test's own connections are gone, too, and it only looks at the rows
    for done in (20, 30, 40):
        fleet.wait_done(done)
        postgres.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 't%'")
        fleet.store.database.close()
    fleet.finish()
    assert fleet.workers == [worker]


@POSTGRES
def test_f23_the_database_is_down(fleet: Fleet, postgres: PostgresServer, broker: RedisServer) -> None:
    """The database is down for 6 seconds instead of 5 minutes, which is longer than a lease and the visibility
    timeout."""
    worker = fleet.start()
    fleet.submit(sleepers(20, 0.2))
    fleet.wait_done(5)
    before = _resident(worker.pid)
    postgres.stop(signal.SIGQUIT)
    time.sleep(6)
    assert worker.process.poll() is None
    assert broker.waiting() + broker.unacked() > 0  # nothing was acknowledged that is not done
    assert _resident(worker.pid) - before < 50 << 20
    postgres.start()
    fleet.finish()


@POSTGRES
def test_f23_a_worker_stops_while_the_database_is_down(fleet: Fleet, postgres: PostgresServer) -> None:
    """The worker must not wait for ever, and jobs that it could not commit run again."""
    worker = fleet.start(EVALPOOL_GRACE_SECONDS="2")
    fleet.submit(sleepers(8, 0.5))
    fleet.wait_done(2)
    postgres.stop(signal.SIGQUIT)
    time.sleep(1.5)
    worker.process.send_signal(signal.SIGTERM)
    code: int | None = None
    try:
        code = worker.process.wait(30)
    finally:
        postgres.start()
    assert code is not None
    fleet.wait_until("its containers are gone", lambda: fleet.clean(worker), 10)
    fleet.start()
    fleet.finish()


@POSTGRES
def test_f24_a_newer_schema_is_refused(fleet: Fleet) -> None:
    """A worker that starts refuses the schema. A worker that runs goes on."""
    old = fleet.start()
    fleet.submit(quick(2))
    fleet.wait_done()
    with fleet.store.database.write() as db:
        now = db.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
        db.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    new = fleet.start(ready=False)
    assert new.process.wait(60) == 1
    assert "9999" in new.log.read_text()
    assert "upgrade evalpool" in new.log.read_text()
    with fleet.store.database.write() as db:
        db.execute(text("UPDATE alembic_version SET version_num = :now"), {"now": now})
    assert old.process.poll() is None
    fleet.submit(quick(2))
    fleet.finish()


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10
