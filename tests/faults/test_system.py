"""F25 to F32: faults of the whole system, from two reconcilers to a reboot."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from evalpool.api import submit_batch
from evalpool.schemas import JobSpec, Limits, QueueUnavailable, Verdict
from evalpool.worker.queue.publish import wake
from tests.conftest import PATIENCE, ROOT, eventually
from tests.faults.fleet import Fleet
from tests.faults.jobs import Known, mixed, quick, sleepers
from tests.faults.proxy import Proxy
from tests.faults.servers import RedisServer, free_port

BOTH = pytest.mark.parametrize("ledger", ["sqlite", "postgresql"], indirect=True)


@BOTH
def test_f25_two_hasty_reconcilers_and_repeated_wake_ups_run_every_job_once(fleet: Fleet) -> None:
    """Both poll ten times a second, and a client wakes them over and over."""
    workers = [fleet.start(ready=False, EVALPOOL_RECONCILE_SECONDS="0.1") for _ in range(2)]
    batch = fleet.submit(mixed(50))
    for worker in workers:
        worker.wait_ready()
    while fleet.done() < 40:
        wake(fleet.broker.client, "again")
        time.sleep(0.1)
    fleet.finish()
    assert {result.attempt for result in fleet.store.batch_results(batch.id)} == {1}


def test_f26_a_consumer_is_slow(fleet: Fleet, broker: RedisServer) -> None:
    """The backlog has 5,000 jobs (100,000 would take too long), and more are submitted. Neither the queue in Redis nor
    the memory of the worker grows with them. After some seconds the rest is cancelled."""
    worker = fleet.start()
    batch = fleet.submit(quick(5000))
    fleet.wait_done(100)
    before = _resident(worker.pid)
    for _ in range(10):
        for known in quick(10):
            fleet.submit_one(known)
        time.sleep(0.5)
        # One message waits, two senders at the same moment may each add one, and the worker's three threads' messages
        # are redelivered.
        assert broker.waiting() <= 5
    assert _resident(worker.pid) - before < 50 << 20
    assert int(broker.client.memory_usage("evalpool.normal") or 0) < 10 << 20  # type: ignore[arg-type]
    fleet.cancel(batch)
    fleet.finish()


def test_f27_a_client_dies_during_a_submission_and_submits_again(fleet: Fleet, redis_link: Proxy) -> None:
    """The submitter is killed when its rows are committed and no worker is woken, since Redis does not answer it."""
    fleet.start()
    jobs = mixed(20)
    redis_link.freeze()
    script = (
        "from tests.faults.jobs import mixed; from api import submit_batch;"
        "submit_batch([known.spec for known in mixed(20)], idempotency_key='once')"
    )
    env = os.environ | {"EVALPOOL_REDIS_URL": redis_link.url}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=env) as client:
        eventually(lambda: _scalar(fleet, "SELECT count(*) FROM jobs") == 20)
        client.kill()
    batch = fleet.submit(jobs, idempotency_key="once")
    assert submit_batch([known.spec for known in jobs], idempotency_key="once").id == batch.id
    assert _scalar(fleet, "SELECT count(*) FROM batches") == 1
    assert fleet.total() == _scalar(fleet, "SELECT count(*) FROM jobs") == 20
    fleet.finish()


def test_f28_a_batch_is_cancelled_half_way(fleet: Fleet) -> None:
    fleet.start()
    jobs = (
        quick(20)
        + [Known(JobSpec(code="import time; time.sleep(600)", limits=Limits(wall_seconds=900)), Verdict.CANCELLED)] * 20
    )
    batch = fleet.submit(jobs)
    fleet.wait_done(20)
    fleet.wait_until("the long ones run", lambda: fleet.store.progress(batch.id).running >= 2)
    batch.cancel()
    fleet.wait_until("nothing runs", lambda: not fleet.store.progress(batch.id).running, 5)
    assert fleet.store.progress(batch.id).complete
    assert fleet.store.progress(batch.id).verdicts == {Verdict.PASSED: 20, Verdict.CANCELLED: 20}
    before = _scalar(fleet, "SELECT max(finished_at) FROM results")
    fleet.submit(quick(4))
    fleet.finish()
    late = f"SELECT count(*) FROM results WHERE batch_id = '{batch.id}' AND finished_at > {before}"
    assert _scalar(fleet, late) == 0  # none of them ran later


def test_f29_workers_are_replaced_under_load(fleet: Fleet) -> None:
    fleet.start()
    batch = fleet.submit(mixed(100, seconds=0.1))
    for done in (10, 40):
        fleet.wait_done(done)
        old = fleet.alive[0]
        fleet.start(ready=False)
        assert old.stop(signal.SIGTERM) == 0
        assert fleet.clean(old)
    fleet.finish()
    assert {result.attempt for result in fleet.store.batch_results(batch.id)} == {1}  # no job has lost an attempt


def test_f30_everything_is_killed_at_once(fleet: Fleet, broker: RedisServer) -> None:
    """Redis comes back without its data, so that all queued messages are lost."""
    fleet.start(ready=False), fleet.start(ready=False)
    for worker in fleet.workers:
        worker.wait_ready()
    fleet.submit(mixed(40, seconds=0.2))
    fleet.wait_done(10)
    broker.kill()
    fleet.kill()
    broker.start(empty=True)
    fleet.start()
    fleet.wait_until("the dead leave nothing", lambda: all(map(fleet.clean, fleet.workers[:2])), 10)
    fleet.finish()


def test_f32_the_monitoring_is_killed(fleet: Fleet, broker: RedisServer, tmp_path: Path) -> None:
    """Flower is killed, and every subscription to Redis, including those to results."""
    port = free_port()
    command = [sys.executable, "-m", "celery", "-A", "worker", "flower", f"--port={port}", "--address=127.0.0.1"]
    fleet.start()
    with (tmp_path / "flower.log").open("wb") as log:
        flower = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **fleet.env}, stdout=log, stderr=log)
    try:
        eventually(lambda: b"Visit me" in (tmp_path / "flower.log").read_bytes(), 60)
        batch = fleet.submit(mixed(40, seconds=0.1))
        fleet.wait_done(10)
    finally:
        flower.kill()
        flower.wait()
    with suppress(Exception):
        broker.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    assert len(list(batch.as_completed(timeout=PATIENCE))) == 40
    fleet.finish()


def test_redis_is_flushed_and_everything_is_killed_and_restarted(fleet: Fleet, broker: RedisServer) -> None:
    """FLUSHALL, and a kill -9 of every worker, in the middle of 400 jobs. `tests/soak.py --flush 2000` has more."""
    fleet.start(ready=False), fleet.start(ready=False)
    batch = fleet.submit(mixed(400, seconds=0.02))
    fleet.wait_done(60)
    broker.client.flushall()
    fleet.kill()
    assert not batch.progress().complete
    fleet.start(ready=False), fleet.start(ready=False)
    fleet.finish()


def test_a_run_with_faults_gives_the_same_results_as_a_run_without(fleet: Fleet, broker: RedisServer) -> None:
    jobs = mixed(40)
    fleet.start()
    calm = fleet.submit(jobs)
    fleet.wait_done()
    rough = fleet.submit(jobs)
    fleet.wait_done(45)
    fleet.workers[0].stop(signal.SIGKILL)
    broker.client.flushall()
    second = fleet.start()
    fleet.wait_done(60)
    for box in fleet.boxes(second):
        with suppress(Exception):
            fleet.engine.api.remove_container(box, force=True)
    fleet.finish()
    one, other = (
        [(one.task_id, one.verdict, one.stdout, one.exit_code) for one in fleet.store.batch_results(each.id)]
        for each in (calm, rough)
    )
    assert one == other


def test_with_redis_down_a_submission_says_so_and_runs_when_it_is_back(fleet: Fleet, broker: RedisServer) -> None:
    """No worker runs during the submission. A worker that starts later finds the rows."""
    broker.kill()
    with pytest.raises(QueueUnavailable) as refused:
        fleet.submit(quick(5))
    assert fleet.store.progress(refused.value.batch_id).queued == 5
    broker.start()
    fleet.start()
    fleet.finish()


def test_one_of_two_workers_is_frozen_for_a_while(fleet: Fleet) -> None:
    """The worker is frozen for longer than its leases. The other one takes its jobs over, and late results are not
    counted."""
    first, second = fleet.start(ready=False), fleet.start(ready=False)
    first.wait_ready(), second.wait_ready()
    fleet.submit(sleepers(30, 0.2))
    fleet.wait_done(5)
    first.process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    first.process.send_signal(signal.SIGCONT)
    fleet.finish()
    assert fleet.workers == [first, second]


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def _scalar(fleet: Fleet, query: str) -> object:
    with fleet.store.database.read() as db:
        return db.exec_driver_sql(query).scalar()
