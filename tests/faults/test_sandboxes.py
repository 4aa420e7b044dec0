"""F14 to F20 and F31: sandboxes that vanish, an engine that is restarted, frozen, full, or answers too late."""

import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import docker
import pytest
from docker.errors import APIError, DockerException

from evalpool.api.connections import fleet as reported
from evalpool.schemas import JobSpec, Limits, Verdict
from evalpool.schemas.rows import job_id
from evalpool.schemas.settings import Settings
from evalpool.worker.sandbox.engine import OWNER
from tests.conftest import WorkerProcess, containers, eventually, freeze, missing
from tests.faults.fleet import Fleet
from tests.faults.jobs import Known, mixed, quick, sleepers
from tests.faults.proxy import Proxy
from tests.faults.servers import Dockerd

IDLE = 1
"""Processes of a sandbox in which nothing runs."""
STRANGER = ("setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace")
"""Starts a worker that may not look into other processes, so that it reaches its sandboxes through the engine alone."""
IMAGE = Settings.model_fields["image"].default


def test_f14_a_poison_job_is_given_up_and_other_jobs_are_not_affected(fleet: Fleet) -> None:
    """The test removes every container in which the job runs."""
    worker = fleet.start()
    poison = Known(JobSpec(code="sleep 4242", tool="bash", limits=Limits(wall_seconds=600)), Verdict.SANDBOX_ERROR)
    batch = fleet.submit([*mixed(20), poison])
    with _killer(fleet, worker, "sleep 4242") as killed:
        fleet.wait_done()
    fleet.finish()
    result = next(fleet.store.results([job_id(batch.id, 20)]))[0]
    assert result.attempt == 3
    assert len(killed) >= 3
    assert "attempt 3" in result.detail


def test_f15_huge_output_is_capped_and_a_worker_that_runs_out_of_memory_is_replaced(fleet: Fleet) -> None:
    """The kernel ends a worker that runs out of memory with SIGKILL, and so does the test."""
    worker = fleet.start()
    fleet.submit(quick(4))
    fleet.wait_done()
    before = _resident(worker)
    loud = JobSpec(code="import os\nwhile 1: os.write(1, b'x' * (1 << 20))", limits=Limits(cpu_seconds=10))
    honest = JobSpec(code="print('x' * 900_000)")
    fleet.submit([Known(loud, Verdict.OUTPUT_LIMIT)] * 2 + [Known(honest, Verdict.PASSED)] * 8)
    fleet.wait_done()
    assert _resident(worker) - before < 100 << 20
    fleet.submit(mixed(20))
    fleet.wait_done(18)
    worker.stop(signal.SIGKILL)
    fleet.start()
    fleet.finish()


def test_f16_a_leased_sandbox_is_removed(fleet: Fleet) -> None:
    """Sandboxes are removed one after the other, and then all at once."""
    worker = fleet.start()
    fleet.submit(sleepers(4, 1))
    fleet.wait_until("jobs run", lambda: fleet.store.progress(next(iter(fleet.expected))).running)
    for box in fleet.boxes(worker):
        with suppress(APIError):
            fleet.engine.api.remove_container(box, force=True)
        time.sleep(0.3)
    fleet.submit(mixed(20))
    fleet.wait_done(6)
    for box in fleet.boxes(worker):
        with suppress(APIError):
            fleet.engine.api.remove_container(box, force=True)
    fleet.finish()


def test_a_link_to_the_engine_that_breaks_again_and_again_is_not_the_programs_fault(
    fleet: Fleet, engine_link: Proxy
) -> None:
    """Each time, the agent sees the end of its standard input, so that the container seems to end by itself."""
    worker = fleet.start(through=STRANGER, DOCKER_HOST=engine_link.url)
    fleet.submit(sleepers(1, 6))
    seen: set[str] = set()
    while len(seen) < 4:
        fleet.wait_until("it runs anew", lambda seen=frozenset(seen): _busy(fleet, worker) - seen)
        seen |= _busy(fleet, worker)
        engine_link.cut()
        engine_link.mend()
    fleet.finish()


def test_a_program_does_not_notice_a_broken_link_to_the_engine_if_its_worker_has_a_direct_line(
    fleet: Fleet, engine_link: Proxy
) -> None:
    worker = fleet.start(DOCKER_HOST=engine_link.url)
    batch = fleet.submit(sleepers(1, 6))
    fleet.wait_until("it runs", lambda: _busy(fleet, worker))
    (seen,) = _busy(fleet, worker)
    for _ in range(3):
        engine_link.cut()
        engine_link.mend()
    fleet.finish()
    (result,) = fleet.store.batch_results(batch.id)
    assert (result.sandbox_id, result.attempt) == (seen, 1)


def test_a_busy_sandbox_is_paused_for_longer_than_the_wall_limit(fleet: Fleet) -> None:
    """The sandbox is paused twice for a little longer than the limit, and then for ever. The worker must remove it."""
    worker = fleet.start()
    tight = Limits(cpu_seconds=10, wall_seconds=3)
    endless = Known(JobSpec(code="import time; time.sleep(1000)", limits=tight), Verdict.TIME_LIMIT)
    batch = fleet.submit([*sleepers(16, 1.5, limits=tight), endless, *mixed(20)])
    for seconds in (4.0, 4.0, 0.0):
        fleet.wait_until("a job runs", lambda: _busy(fleet, worker))
        box = random.choice(sorted(_busy(fleet, worker)) or fleet.boxes(worker))
        with suppress(APIError):  # it has just been replaced
            freeze(fleet.engine, box)
            time.sleep(seconds)
            if seconds:
                fleet.engine.api.unpause(box)
    fleet.finish()
    assert fleet.workers == [worker]
    assert all(result.attempt == 1 for result in fleet.store.batch_results(batch.id))


@pytest.mark.parametrize(
    ("how", "options"), [(signal.SIGTERM, ()), (signal.SIGKILL, ("--live-restore",))], ids=["stopped", "live restore"]
)
def test_f17_the_engine_is_restarted(
    fleet: Fleet, own_engine: Dockerd, how: signal.Signals, options: tuple[str, ...]
) -> None:
    own_engine.stop()
    own_engine.start(*options)
    worker = fleet.start()
    fleet.submit(mixed(40, seconds=0.2))
    fleet.wait_done(6)
    own_engine.stop(how)
    time.sleep(0.5)
    own_engine.start(*options)
    fleet.finish()
    assert fleet.workers == [worker]


def test_f18_the_engine_is_frozen(fleet: Fleet, own_engine: Dockerd) -> None:
    """The engine is frozen for 6 seconds instead of 30, and calls time out after 2 seconds instead of 60."""
    worker = fleet.start(EVALPOOL_DOCKER_TIMEOUT="2", EVALPOOL_MAX_USES="3")
    batch = fleet.submit(mixed(40))
    fleet.wait_done(10)
    assert own_engine.process is not None
    own_engine.process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    own_engine.process.send_signal(signal.SIGCONT)
    fleet.finish()
    assert fleet.workers == [worker]
    assert Verdict.SANDBOX_ERROR not in fleet.store.progress(batch.id).verdicts


def test_f18_the_engine_does_not_answer(fleet: Fleet, engine_link: Proxy) -> None:
    """The proxy in front of the engine is silent, so that even the streams of running sandboxes are."""
    worker = fleet.start(DOCKER_HOST=engine_link.url, EVALPOOL_DOCKER_TIMEOUT="2", EVALPOOL_MAX_USES="3")
    fleet.submit(mixed(40))
    fleet.wait_done(10)
    engine_link.freeze()
    time.sleep(5)
    engine_link.thaw()
    fleet.finish()
    assert fleet.workers == [worker]


def test_f19_the_image_is_removed(fleet: Fleet, own_engine: Dockerd) -> None:
    """Only its name is removed, since running containers keep the image. Jobs submitted before are pinned to its digest
    and still run. Later jobs wait, none fails, and the worker says why. A worker refuses to start meanwhile."""
    worker = fleet.start(EVALPOOL_MAX_USES="2")
    fleet.wait_until("it reports", lambda: reported().has(IMAGE))
    before = fleet.submit(mixed(30))
    fleet.wait_done(6)
    own_engine.docker("rmi", "--force", IMAGE)
    try:
        fleet.wait_done()
        fleet.wait_until("it has noticed", lambda: not reported().has(IMAGE))
        after = fleet.submit(mixed(30))
        fleet.wait_until("it says so", lambda: "image_absent" in worker.log.read_text())
        late = fleet.start(ready=False)
        assert late.process.wait(60) == 1
        assert "images build" in late.log.read_text()
        fleet.wait_until("nothing is in its hands", lambda: not fleet.store.progress(after.id).running)
        assert fleet.store.progress(after.id).queued == 30
        assert set(fleet.attempts(after).values()) == {0}
        assert worker.process.poll() is None
    finally:
        own_engine.docker("tag", "evalpool/kept:1", IMAGE)
    fleet.finish()
    # nobody's fault, nobody's attempt
    assert {*fleet.attempts(before).values(), *fleet.attempts(after).values()} == {1}


def test_f20_the_disk_of_the_engine_is_full(fleet: Fleet, own_engine: Dockerd) -> None:
    worker = fleet.start(EVALPOOL_MAX_USES="2")
    batch = fleet.submit(mixed(30))
    fleet.wait_done(6)
    with _full(own_engine.data):
        eventually(lambda: "no space" in worker.log.read_text(), 30)
        time.sleep(2)
        assert Verdict.SANDBOX_ERROR not in fleet.store.progress(batch.id).verdicts
    fleet.finish()
    assert fleet.workers == [worker]


def test_f20_the_disk_of_the_ledger_is_full(fleet: Fleet, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SQLite file is on this disk. Nothing is lost, the error is logged, and work goes on when there is room."""
    from evalpool.schemas.database import Database
    from evalpool.schemas.store import Store

    url = f"sqlite:///{small_disk / 'ledger.db'}"
    monkeypatch.setenv("EVALPOOL_DATABASE_URL", url)
    fleet.store = Store(Database(url))
    worker = fleet.start()
    wordy = [
        Known(JobSpec(code=f"print({i})\nprint('x' * 20_000)"), Verdict.PASSED, f"{i}\n{'x' * 20_000}\n")
        for i in range(100)
    ]
    fleet.submit(wordy)
    fleet.wait_done(5)
    with _full(small_disk):
        eventually(lambda: "disk is full" in worker.log.read_text(), 30)
        time.sleep(3)
        assert worker.process.poll() is None
    fleet.finish()
    with fleet.store.database.read() as db:
        assert db.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
    fleet.store.database.close()


def test_f20_the_disk_of_the_logs_is_full(fleet: Fleet, small_disk: Path) -> None:
    place, fleet.place = fleet.place, small_disk
    worker = fleet.start()
    fleet.place = place
    with _full(small_disk):
        fleet.submit(mixed(30))
        fleet.finish()
    assert fleet.workers == [worker]


def test_f31_a_container_that_nobody_waited_for_is_removed(fleet: Fleet) -> None:
    """The container was created but never started, and its owner is dead. Only a label shows whose it was."""
    dead = fleet.start()
    label = fleet.engine.containers.get(fleet.boxes(dead)[0]).labels[OWNER]
    dead.stop(signal.SIGKILL)
    eventually(lambda: fleet.clean(dead), 5)
    fleet.engine.api.create_container(IMAGE, labels={OWNER: label}, command=["true"], entrypoint=[])
    assert len(fleet.boxes(dead)) == 1
    fleet.start()
    eventually(lambda: fleet.clean(dead), 5)
    fleet.submit(quick(3))
    fleet.finish()


def test_f31_a_container_that_is_created_after_our_timeout_is_removed(fleet: Fleet, engine_link: Proxy) -> None:
    """The answer of the engine comes after 4 seconds, but calls time out after 2. The container must not stay."""
    worker = fleet.start(DOCKER_HOST=engine_link.url, EVALPOOL_DOCKER_TIMEOUT="2", EVALPOOL_MAX_USES="3")
    engine_link.late = (b"/containers/create", 4.0)
    fleet.submit(mixed(30))
    eventually(lambda: "breaker_open" in worker.log.read_text() or "refill_failed" in worker.log.read_text(), 30)
    time.sleep(4)
    engine_link.late = None
    fleet.wait_done()
    fleet.wait_until("no container too many", lambda: len(fleet.boxes(worker)) <= 3, 20)
    fleet.finish()


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        missing("no tmpfs can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@contextmanager
def _full(place: Path) -> Iterator[None]:
    """Fill the file system to the last byte."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x")
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def _killer(fleet: Fleet, worker: WorkerProcess, words: str) -> Iterator[list[str]]:
    """Kill every container in which such a process runs, as soon as it is seen."""
    killed: list[str] = []
    over = threading.Event()
    client = docker.from_env(timeout=60)

    def look() -> None:
        while not over.wait(0.1):
            for box in containers(client, worker.pid):
                with suppress(DockerException):
                    if _is_in(client, box, words):
                        client.api.remove_container(box, force=True)
                        killed.append(box)

    thread = threading.Thread(target=look, name="killer")
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()
        client.close()


def _busy(fleet: Fleet, worker: WorkerProcess) -> set[str]:
    """Return the containers of a worker in which a job runs, besides the agent."""
    found = set()
    for box in fleet.boxes(worker):
        with suppress(DockerException):
            if len(fleet.engine.api.top(box)["Processes"] or ()) > IDLE:
                found.add(box)
    return found


def _is_in(client: docker.DockerClient, box: str, words: str) -> bool:
    return any(words in " ".join(process) for process in client.api.top(box)["Processes"] or ())


def _resident(worker: WorkerProcess) -> int:
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10
