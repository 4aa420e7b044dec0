"""Real parts: a private redis-server, containers, worker processes. A missing one skips on a laptop and fails in CI."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import docker
import pytest
import redis
from docker.errors import APIError, DockerException, ImageNotFound

from evalpool.schemas.database import Database
from evalpool.schemas.settings import Settings
from evalpool.schemas.store import Store
from evalpool.worker.sandbox.engine import OWNER

ROOT = Path(__file__).parent.parent
PATIENCE = 120.0
"""Seconds that a test waits for what must happen; never a measure of speed."""


def missing(what: str) -> None:
    """Skip on a laptop, fail in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"{what}; CI has no excuse", pytrace=False)
    pytest.skip(what)


def eventually(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the settings, the database or the Redis of the machine it runs on."""
    for name in [name for name in os.environ if name.startswith("EVALPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EVALPOOL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("evalpool.schemas.settings.MACHINE_SOCKET", tmp_path / "machine.sock")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """A Redis of our own."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        missing("no redis-server or valkey-server here")
    assert binary is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    url = f"redis://127.0.0.1:{port}/0"
    with redis.Redis.from_url(url) as client:
        eventually(lambda: answers(client))
    yield url
    process.kill()
    process.wait()


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """The walls of sandboxes that are no containers."""
    if shutil.which("bwrap") is None:
        missing("no bubblewrap here")


def answers(client: "redis.Redis") -> bool:
    """Whether it is up."""
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


@pytest.fixture
def redis_url(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """That Redis, empty, and named in the settings."""
    monkeypatch.setenv("EVALPOOL_REDIS_URL", redis_server)
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A ledger in a fresh SQLite file, named in the settings."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    monkeypatch.setenv("EVALPOOL_DATABASE_URL", url)
    database = Database(url)
    yield Store(database)
    database.close()


@pytest.fixture(scope="session")
def engine_client() -> Iterator[docker.DockerClient]:
    """The Docker engine, with the sandbox image."""
    try:
        client = docker.from_env(timeout=60)
        client.images.get(Settings.model_fields["image"].default)
    except ImageNotFound:
        missing("the sandbox image is missing: evalpool images build")
    except DockerException as error:
        missing(f"no Docker engine: {error}")
    yield client
    client.close()


def containers(client: docker.DockerClient, pid: int | None = None) -> list[str]:
    """The ids of our containers, of one owner or of all."""
    found = client.api.containers(all=True, filters={"label": OWNER})
    return [each["Id"] for each in found if pid is None or each["Labels"][OWNER].split(":")[1] == str(pid)]


def freeze(client: docker.DockerClient, box: str) -> None:
    """Pause a container. On a busy machine runc may give up with "unable to freeze"; then it is asked again."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return client.api.pause(box)
        except APIError as error:
            if "unable to freeze" not in str(error) or time.monotonic() > deadline:
                raise


class WorkerProcess:
    """A real `celery -A worker worker`, started by the command `through` if there is one."""

    def __init__(self, log: Path, app: str = "worker", through: Sequence[str] = (), **env: str) -> None:
        self.log = log
        self.node = f"test-{secrets.token_hex(4)}@{socket.gethostname()}"
        command = [
            *through,
            sys.executable,
            "-m",
            "celery",
            "-A",
            app,
            "worker",
            "-l",
            "INFO",
            "--without-mingle",
            "-n",
            self.node,
        ]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, stdout=out, stderr=out)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> "WorkerProcess":
        eventually(lambda: b" ready." in self.log.read_bytes() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait for its end; its exit code."""
        self.process.send_signal(how)
        return self.process.wait(PATIENCE)


@pytest.fixture
def start_worker(
    store: Store, redis_url: str, engine_client: docker.DockerClient, tmp_path: Path
) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts workers against this test's ledger and queue, and ends those that are left."""
    workers: list[WorkerProcess] = []

    def start(**env: str) -> WorkerProcess:
        workers.append(WorkerProcess(tmp_path / f"worker-{len(workers)}.log", **env))
        return workers[-1].wait_ready()

    yield start
    for worker in workers:
        if worker.process.poll() is None:
            worker.stop()
    eventually(lambda: not any(containers(engine_client, worker.pid) for worker in workers))
