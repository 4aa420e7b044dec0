"""F1 to F5: workers that die, and workers that are told to stop."""

import signal
import time

import pytest
from sqlalchemy import text

from evalpool.schemas import Verdict
from evalpool.schemas.store import Store
from tests.conftest import eventually
from tests.faults.fleet import Fleet
from tests.faults.jobs import mixed, quick, sleepers
from tests.faults.proxy import Proxy
from tests.faults.servers import RedisServer

BOTH = pytest.mark.parametrize("ledger", ["sqlite", "postgresql"], indirect=True)


@BOTH
def test_f1_a_worker_killed_mid_job_leaves_no_container_and_its_jobs_run_elsewhere(fleet: Fleet) -> None:
    first, second = fleet.start(ready=False), fleet.start(ready=False)
    batch = fleet.submit(mixed(40, seconds=0.2))
    first.wait_ready()
    fleet.wait_done(5)
    fleet.wait_until("the first runs a job", lambda: fleet.store.progress(batch.id).running)
    first.stop(signal.SIGKILL)
    eventually(lambda: fleet.clean(first), 2)
    second.wait_ready()
    fleet.finish()


def test_f2_a_message_that_redis_loses_delays_jobs_but_loses_none(fleet: Fleet, broker: RedisServer) -> None:
    """The message is lost twice: with a worker that is frozen and then killed, and because the test removes it."""
    worker = fleet.start()
    worker.process.send_signal(signal.SIGSTOP)
    fleet.submit(quick(1))
    worker.stop(signal.SIGKILL)
    fleet.submit(quick(2))
    while broker.client.lpop("evalpool.normal"):
        pass
    fleet.start()
    fleet.finish()


@BOTH
def test_f3_a_worker_is_killed_between_commit_and_acknowledgement(
    fleet: Fleet, broker: RedisServer, redis_link: Proxy, ledger: Store
) -> None:
    """The link to Redis falls silent while jobs run: they are committed, but nothing is acknowledged; then the worker
    is killed. The messages come back, and nothing that is committed is run again."""
    # The worker does not look for jobs without a message, or the message might come when they are all claimed.
    worker = fleet.start(EVALPOOL_REDIS_URL=redis_link.url, EVALPOOL_RECONCILE_SECONDS="600")
    batch = fleet.submit(sleepers(4, 0.5))
    fleet.wait_until("jobs run", lambda: ledger.progress(batch.id).running)
    redis_link.freeze()
    time.sleep(1.5)
    fleet.wait_until("a commit without an ack", lambda: ledger.progress(batch.id).done and broker.unacked())
    worker.stop(signal.SIGKILL)
    before = _committed(ledger)
    redis_link.thaw()
    fleet.start()
    fleet.finish()
    assert before
    assert before.items() <= _committed(ledger).items()  # not one row of them was touched


def test_f4_a_warm_stop_finishes_the_running_jobs(fleet: Fleet, broker: RedisServer) -> None:
    worker = fleet.start()
    batch = fleet.submit(sleepers(10, 0.5))
    fleet.wait_until("jobs run", lambda: fleet.store.progress(batch.id).running >= 2)
    assert worker.stop(signal.SIGTERM) == 0
    progress = fleet.store.progress(batch.id)
    assert (broker.unacked(), progress.running) == (0, 0)
    assert 0 < progress.finished < 10  # what ran was finished, the rest was not begun
    assert fleet.clean(worker)
    fleet.start()
    fleet.finish()
    assert {result.attempt for result in fleet.store.batch_results(batch.id)} == {1}


@pytest.mark.parametrize("signals", [(signal.SIGQUIT,), (signal.SIGTERM, signal.SIGTERM)], ids=["quit", "term twice"])
def test_f5_a_cold_stop_puts_the_jobs_back(fleet: Fleet, signals: tuple[signal.Signals, ...]) -> None:
    worker = fleet.start(EVALPOOL_LEASE_SECONDS="600")  # so that a lease that is left would never run out in time
    batch = fleet.submit(sleepers(3, 3))
    fleet.wait_until("jobs run", lambda: fleet.store.progress(batch.id).running >= 2)
    begun = time.monotonic()
    for each in signals:
        worker.process.send_signal(each)
        time.sleep(0.5)
    worker.process.wait(60)
    took = time.monotonic() - begun
    assert fleet.store.progress(batch.id).running == 0, f"after {took:.0f} s"
    fleet.wait_until("its containers are gone", lambda: fleet.clean(worker), 10)
    fleet.start()
    fleet.finish()
    assert fleet.store.progress(batch.id).verdicts == {Verdict.PASSED: 3}


def _committed(ledger: Store) -> dict[str, tuple[object, ...]]:
    with ledger.database.read() as db:
        query = text(
            "SELECT r.job_id, r.attempt, r.finished_at, r.worker, j.attempt "
            "FROM results r JOIN jobs j ON j.id = r.job_id"
        )
        return {row[0]: tuple(row) for row in db.execute(query)}
