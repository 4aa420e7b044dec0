"""Real worker processes, a real Redis and real containers: what a user would see."""

import io
import json
import os
import secrets
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import docker
import pytest
import redis

from evalpool.api import submit_batch, submit_job
from evalpool.api.connections import fleet
from evalpool.schemas import Case, JobSpec, Limits, Settings, State, Verdict
from evalpool.schemas.store import Store
from tests.conftest import PATIENCE, ROOT, WorkerProcess, answers, containers, eventually

pytestmark = [pytest.mark.docker, pytest.mark.redis]

Start = Callable[..., WorkerProcess]

CHECKER = "import sys; got, wanted = (int(open(name).read()) for name in sys.argv[2:]); sys.exit(abs(got - wanted) > 1)"
SCRIPT = "import sys\ndef f(x): return x + 1\nif __name__ == '__main__': sys.exit(0)\n"
"""This program exits as a script. It must not do so if its function is called."""


def inspect(node: str, *what: str) -> bytes:
    """Return what `celery inspect` prints about one worker."""
    command = [sys.executable, "-m", "celery", "-A", "worker", "inspect", *what, "-t", "60", "-d", node]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=PATIENCE).stdout


def test_a_job_is_submitted_run_and_recorded(start_worker: Start, engine_client: docker.DockerClient) -> None:
    worker = start_worker()
    before = containers(engine_client, worker.pid)
    result = submit_job(code="print(input())", stdin="hi", task_id="t", labels={"a": 1}).result(timeout=PATIENCE)
    assert (result.verdict, result.passed, result.stdout, result.exit_code) == (Verdict.PASSED, True, "hi\n", 0)
    assert (result.task_id, result.labels, result.attempt) == ("t", {"a": 1}, 1)
    metrics = result.metrics
    assert metrics.cpu_seconds > 0
    assert metrics.wall_seconds > 0
    assert metrics.peak_memory_bytes > 1 << 20
    assert metrics.queue_seconds >= 0
    assert metrics.setup_seconds >= 0
    assert (metrics.sandbox_uses, metrics.processes_peak, metrics.output_bytes, metrics.oom_killed) == (1, 1, 3, False)
    assert result.sandbox_id in before
    assert result.image_digest
    assert result.image_digest.startswith("sha256:")
    assert containers(engine_client, worker.pid) == before  # none was created for the job
    assert worker.stop() == 0
    assert containers(engine_client, worker.pid) == []


def test_every_kind_of_job_gets_its_verdict(start_worker: Start) -> None:
    start_worker()
    double = "print(2 * int(input()))"
    jobs = {
        "cases": (JobSpec(code=double, cases=[Case("1", "2"), Case("4", "8")]), Verdict.PASSED),
        "case": (JobSpec(code=double, cases=[Case("1", "3"), Case("4", "8")], stop_early=False), Verdict.WRONG_ANSWER),
        "shell": (
            JobSpec(code="cat f; echo $X", tool="bash", files={"f": "base64:aGk="}, env={"X": "y"}),
            Verdict.PASSED,
        ),
        "multi": (JobSpec(code="exit 3", tool="multi_code_executor", language="bash"), Verdict.RUNTIME_ERROR),
        "check": (JobSpec(code="def f(): return 1", check="assert f() == 1"), Verdict.PASSED),
        "wrong": (JobSpec(code="def f(): return 2", check="assert f() == 1"), Verdict.WRONG_ANSWER),
        "early": (JobSpec(code="import os; os._exit(0)", check="assert 0"), Verdict.EARLY_EXIT),
        "fresh": (JobSpec(code="pass", isolation="fresh"), Verdict.PASSED),
        "accepted": (
            JobSpec(code="print(3)", cases=[Case("", "4", comparator="checker")], checker=CHECKER),
            Verdict.PASSED,
        ),
        "rejected": (
            JobSpec(code="print(9)", cases=[Case("", "4", comparator="checker")], checker=CHECKER),
            Verdict.WRONG_ANSWER,
        ),
        "evasive": (
            JobSpec(code="print('x')", cases=[Case("", "4", comparator="checker")], checker=CHECKER),
            Verdict.WRONG_ANSWER,
        ),
        "called": (
            JobSpec(code=SCRIPT, entry_point="f", cases=[Case("[20]", "21", comparator="json")]),
            Verdict.PASSED,
        ),
        "asked": (JobSpec(code=SCRIPT, entry_point="f", check="assert f(1) == 2"), Verdict.PASSED),
        "script": (JobSpec(code=SCRIPT, check="assert f(1) == 2"), Verdict.EARLY_EXIT),
        "greedy": (JobSpec(code="x = bytearray(10**9)", limits=Limits(memory_mib=64)), Verdict.MEMORY_LIMIT),
        "slow": (JobSpec(code="while 1: pass", limits=Limits(cpu_seconds=0.5)), Verdict.TIME_LIMIT),
        "loud": (JobSpec(code="while 1: print('x' * 1000)"), Verdict.OUTPUT_LIMIT),
        "broken": (JobSpec(code="def"), Verdict.COMPILE_ERROR),
    }
    batch = submit_batch([spec.model_copy(update={"task_id": name}) for name, (spec, _) in jobs.items()])
    results = {result.task_id: result for result in batch.as_completed(timeout=PATIENCE)}
    assert {name: results[name].verdict for name in jobs} == {name: verdict for name, (_, verdict) in jobs.items()}
    assert [case.verdict for case in results["case"].cases] == [Verdict.WRONG_ANSWER, Verdict.PASSED]
    assert results["shell"].stdout == "hiy\n"
    assert results["greedy"].metrics.oom_killed
    assert results["fresh"].metrics.sandbox_uses == 1
    assert results["loud"].stdout_truncated


def test_a_terminated_worker_drains_and_another_finishes_the_batch(
    start_worker: Start, engine_client: docker.DockerClient, store: Store
) -> None:
    first = start_worker()
    batch = submit_batch([JobSpec(code="import time; time.sleep(0.1); print(1)")] * 100)
    eventually(lambda: batch.progress().finished >= 5)
    assert first.stop(signal.SIGTERM) == 0
    eventually(lambda: not containers(engine_client, first.pid))
    progress = batch.progress()
    assert 5 <= progress.finished < 100
    assert progress.running == 0
    start_worker()
    batch.wait(timeout=PATIENCE)
    assert batch.progress().verdicts == {Verdict.PASSED: 100}


def test_a_killed_worker_leaves_no_container_and_its_jobs_are_run_again(
    start_worker: Start, engine_client: docker.DockerClient
) -> None:
    first = start_worker(EVALPOOL_LEASE_SECONDS="10", EVALPOOL_RECONCILE_SECONDS="0.5")
    batch = submit_batch([JobSpec(code="import time; time.sleep(0.1); print(1)")] * 60)
    eventually(lambda: batch.progress().finished >= 5)
    first.stop(signal.SIGKILL)
    eventually(lambda: not containers(engine_client, first.pid))
    assert batch.progress().running > 0
    start_worker(EVALPOOL_RECONCILE_SECONDS="0.5")
    batch.wait(timeout=PATIENCE)
    results = batch.results()
    assert batch.progress().verdicts == {Verdict.PASSED: 60}
    assert len({result.job_id for result in results}) == 60
    assert max(result.attempt for result in results) == 2


def test_cancelling_a_batch_stops_its_running_jobs_and_starts_no_others(start_worker: Start) -> None:
    start_worker()
    batch = submit_batch([JobSpec(code="import time; time.sleep(1000)", limits=Limits(wall_seconds=900))] * 10)
    eventually(lambda: batch.progress().running >= 1)
    batch.cancel()
    batch.wait(timeout=PATIENCE)
    assert batch.progress().verdicts == {Verdict.CANCELLED: 10}
    assert submit_job(code="print(1)").result(timeout=PATIENCE).passed


def test_a_lost_container_is_our_failure_and_the_job_runs_elsewhere(
    start_worker: Start, engine_client: docker.DockerClient
) -> None:
    worker = start_worker()
    job = submit_job(code="import time; time.sleep(2); print('done')")
    eventually(lambda: job.state() == "running")
    for box in containers(engine_client, worker.pid):
        engine_client.api.remove_container(box, force=True)
    result = job.result(timeout=PATIENCE)
    assert (result.verdict, result.stdout) == (Verdict.PASSED, "done\n")


def test_a_worker_ends_jobs_above_its_own_ceilings_at_once(start_worker: Start) -> None:
    start_worker(EVALPOOL_MAX_MEMORY_MIB="256")
    refused, ran = (submit_job(code="print(1)", limits=Limits(memory_mib=memory)) for memory in (512, 256))
    result = refused.result(timeout=PATIENCE)
    assert (result.verdict, result.attempt) == (Verdict.SANDBOX_ERROR, 1)
    assert result.detail == "limits.memory_mib: 512 is more than the 256 that EVALPOOL_MAX_MEMORY_MIB allows"
    assert ran.result(timeout=PATIENCE).passed


def test_the_redis_behind_the_socket_of_the_state_directory_is_found_and_used(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="ep-") as state:  # the path of a socket must be short
        place = Path(state) / "redis"
        place.mkdir()
        command = ["redis-server", "--port", "0", "--unixsocket", str(place / "redis.sock"), "--save", ""]
        server = subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL)
        try:
            with redis.Redis(unix_socket_path=str(place / "redis.sock")) as client:
                eventually(lambda: answers(client))
                monkeypatch.delenv("EVALPOOL_REDIS_URL")
                monkeypatch.setenv("EVALPOOL_STATE_DIR", state)
                worker = start_worker()
                assert submit_job(code="print(7)").result(timeout=PATIENCE).stdout == "7\n"
                assert b"pong" in inspect(worker.node, "ping")
                assert client.exists("_kombu.binding.evalpool")
                assert worker.stop() == 0
        finally:
            server.kill()
            server.wait()


def test_the_pool_can_be_inspected_with_celerys_own_command(start_worker: Start) -> None:
    (pool,) = json.loads(inspect(start_worker().node, "sandbox_pool", "--json")).values()
    assert pool["idle"] == pool["slots"] + 1
    assert pool["counts"]["created"] == pool["slots"] + 1


def test_unreadable_messages_stop_no_worker_and_are_kept_as_dead_letters(start_worker: Start, store: Store) -> None:
    from evalpool.worker.queue.celery import RUN, app

    worker = start_worker()
    with app.connection_for_write(os.environ["EVALPOOL_REDIS_URL"]) as connection:
        for body in ({"a": 1}, ["no-such-job-000001"], "x", 7):
            app.send_task(RUN, args=(body,), connection=connection, queue="evalpool.normal")
        app.send_task("evalpool.unknown", connection=connection, queue="evalpool.normal")
    assert submit_job(code="print(1)").result(timeout=PATIENCE).passed
    assert worker.process.poll() is None
    eventually(lambda: store.letters() == 4)  # all but the one about a job that is not there


def test_a_worker_without_its_image_refuses_to_start(
    store: Store, redis_url: str, engine_client: docker.DockerClient
) -> None:
    command = [sys.executable, "-m", "celery", "-A", "worker", "worker"]
    env = {**os.environ, "EVALPOOL_IMAGE": "evalpool/none:0"}
    refused = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=PATIENCE, text=True)
    assert refused.returncode == 1
    remedy = "`docker pull evalpool/none:0` fetches it from a registry, or correct EVALPOOL_IMAGE"
    assert f"there is no image evalpool/none:0; {remedy}" in refused.stderr


def test_a_worker_with_an_unknown_runtime_says_which_setting_is_wrong(
    store: Store, redis_url: str, engine_client: docker.DockerClient
) -> None:
    command = [sys.executable, "-m", "celery", "-A", "worker", "worker"]
    env = {**os.environ, "EVALPOOL_RUNTIME": "nonsense"}
    refused = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=PATIENCE, text=True)
    assert refused.returncode == 1
    assert "correct EVALPOOL_RUNTIME" in refused.stderr


def test_a_single_job_can_be_cancelled_while_it_waits_or_runs(start_worker: Start) -> None:
    start_worker(EVALPOOL_SLOTS="1")
    running = submit_job(code="import time; time.sleep(1000)", limits=Limits(wall_seconds=900))
    eventually(lambda: running.state() == "running")
    waiting = submit_job(code="print(1)")
    waiting.cancel()
    assert waiting.result(timeout=PATIENCE).verdict is Verdict.CANCELLED
    running.cancel()
    assert running.result(timeout=PATIENCE).verdict is Verdict.CANCELLED


def test_a_second_signal_puts_the_running_jobs_back_at_once(start_worker: Start, store: Store) -> None:
    worker = start_worker()
    job = submit_job(code="import time; time.sleep(600)", limits=Limits(wall_seconds=900))
    eventually(lambda: job.state() == "running")
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: b"Warm shutdown" in worker.log.read_bytes())
    worker.process.send_signal(signal.SIGTERM)
    worker.process.wait(PATIENCE)
    assert job.state() == "queued"
    (lease,) = store.claim(1, "w", 60).leases
    assert lease.attempt == 1


def test_a_worker_puts_its_jobs_back_after_its_grace_period(start_worker: Start) -> None:
    worker = start_worker(EVALPOOL_GRACE_SECONDS="1")
    job = submit_job(code="import time; time.sleep(600)", limits=Limits(wall_seconds=900))
    eventually(lambda: job.state() == "running")
    assert worker.stop() == 0
    assert job.state() == "queued"


def test_the_detail_of_a_job_that_is_given_up_lists_our_failures(start_worker: Start) -> None:
    start_worker()
    image = Settings.model_fields["image"].default
    result = submit_job(code="int main() {}", language="c", image=image).result(timeout=PATIENCE)
    assert (result.verdict, result.attempt) == (Verdict.SANDBOX_ERROR, 3)
    assert result.detail.count("attempt") >= 3
    assert result.detail.count(f"{image} has no gcc") == 1  # the same reason is given once, not three times


def test_a_job_whose_image_no_worker_has_waits_and_the_reason_is_given(start_worker: Start) -> None:
    start_worker()
    eventually(lambda: fleet().members)
    job = submit_job(code="print(1)", image="evalpool/none:0")
    assert submit_job(code="print(1)").result(timeout=PATIENCE).passed  # by then, the worker has seen the first job
    with pytest.raises(TimeoutError, match=r"1 job waits for the image evalpool/none:0, which no worker has"):
        job.result(timeout=1)
    assert job.state() is State.QUEUED


def test_replaced_sandboxes_leave_no_descriptor_or_thread_behind(start_worker: Start) -> None:
    worker = start_worker()
    of = Path(f"/proc/{worker.pid}")

    def held() -> int:
        return len(list((of / "fd").iterdir())) + len(list((of / "task").iterdir()))

    def run() -> None:
        batch = submit_batch([JobSpec(code="pass", isolation="fresh")] * 10)
        batch.wait(timeout=PATIENCE)
        assert batch.progress().verdicts == {Verdict.PASSED: 10}

    run()
    seen = []
    for _ in range(20):  # sandboxes are just coming and going, and each holds several
        seen.append(held())
        time.sleep(0.1)
    most = max(seen) + 3
    run()
    eventually(lambda: held() <= most)


def test_an_image_in_which_nothing_can_be_started_affects_only_its_own_jobs(
    start_worker: Start, engine_client: docker.DockerClient
) -> None:
    name = f"evalpool-test/empty-{secrets.token_hex(4)}:1"
    engine_client.api.import_image_from_data(_empty_archive(), repository=name.split(":")[0], tag="1")
    try:
        worker = start_worker()
        job = submit_job(code="print(1)", image=name)
        result = job.result(timeout=PATIENCE)
    finally:
        engine_client.api.remove_image(name, force=True)
    assert (result.verdict, result.attempt) == (Verdict.SANDBOX_ERROR, 3)
    assert "executable file not found" in result.detail
    assert "breaker_open" not in worker.log.read_text()


def test_a_job_of_an_older_version_whose_image_is_not_here_keeps_no_worker_busy(
    start_worker: Start, store: Store, redis_url: str
) -> None:
    worker = start_worker(EVALPOOL_RECONCILE_SECONDS="0.5")
    store.add_batch("b", [JobSpec(code="x", image="nobody/has:1")], None, None)  # its row names no image
    eventually(lambda: "image_absent" in worker.log.read_text())
    with redis.Redis.from_url(redis_url) as client:
        before = _pushes(client)
        time.sleep(3)
        assert _pushes(client) - before < 5
    assert store.state("b-000000") is State.QUEUED


def _pushes(client: "redis.Redis") -> int:
    """Return how many messages have been sent."""
    return int(client.info("commandstats").get("cmdstat_lpush", {}).get("calls", 0))


def _empty_archive() -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as files:
        files.addfile(tarfile.TarInfo("nothing"))
    return archive.getvalue()


def test_workers_are_woken_even_if_an_unreadable_message_was_in_the_queue(
    start_worker: Start, store: Store, redis_url: str
) -> None:
    worker = start_worker(EVALPOOL_RECONCILE_SECONDS="600")
    assert submit_job(code="print(1)").result(timeout=PATIENCE).passed  # its first look is over
    with redis.Redis.from_url(redis_url) as client:
        store.add_batch("b", [JobSpec(code="print(1)")], None, None)
        client.lpush("evalpool.normal", b"no message")  # so that nobody would send another
        eventually(lambda: store.progress("b").complete)
    assert "bad_message" in worker.log.read_text()


def test_only_jobs_in_a_slot_count_as_running(store: Store, start_worker: Start) -> None:
    start_worker(EVALPOOL_SLOTS="1")
    batch = submit_batch([{"code": "import time; time.sleep(0.05)"}] * 60)
    most_claimed = 0
    for progress in batch.watch(0.02, PATIENCE):
        assert progress.running <= 1
        with store.database.read() as db:
            claimed = db.exec_driver_sql("SELECT count(*) FROM jobs WHERE state = 'running'").scalar_one()
        most_claimed = max(most_claimed, claimed)
    assert most_claimed > 1


def test_a_worker_does_without_a_preloaded_module_that_an_image_lacks_and_says_why(
    start_worker: Callable[..., WorkerProcess],
) -> None:
    worker = start_worker(EVALPOOL_PRELOAD="asyncio.windows_events,decimal", EVALPOOL_SLOTS="1")
    job = submit_job(code="import sys; print('decimal' in sys.modules)")
    assert job.result(PATIENCE).stdout == "True\n"
    told = "asyncio.windows_events cannot be imported in the image evalpool/python:3.11 (ImportError: win32 only)"
    assert worker.log.read_text().count(told) == 1
