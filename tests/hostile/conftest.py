"""One worker, one Redis and one ledger for the whole suite, so that a case meets what the last one left behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.conftest import WorkerProcess, containers, eventually
from tests.hostile import monitor
from tests.hostile.stack import POOL, SLOTS, Stack


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fast: the daily part of the hostile suite")


@pytest.fixture(scope="module")
def hostile_env(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that the worker and the tests share."""
    folder = tmp_path_factory.mktemp("hostile")
    runtime = os.environ.get("HOSTILE_RUNTIME")  # runs the same table under gVisor, for example
    return {
        **({"EVALPOOL_RUNTIME": runtime} if runtime else {}),
        "EVALPOOL_REDIS_URL": redis_server.removesuffix("/0") + "/7",
        "EVALPOOL_DATABASE_URL": f"sqlite:///{folder / 'ledger.db'}",
        "EVALPOOL_STATE_DIR": str(folder / "state"),
        "EVALPOOL_SLOTS": str(SLOTS),
        "EVALPOOL_IDLE": str(POOL - SLOTS),  # a fixed number of sandboxes, whatever the cases ask for
    }


@pytest.fixture(scope="module")
def one_stack(hostile_env: dict[str, str], engine_client: docker.DockerClient) -> Iterator[Stack]:
    """A worker that has been warmed up."""
    ledger = Path(hostile_env["EVALPOOL_DATABASE_URL"].removeprefix("sqlite:///"))
    before = {name: value for name, value in os.environ.items() if name.startswith("EVALPOOL_")}
    for name in before:
        del os.environ[name]
    os.environ.update(hostile_env)
    holds = ledger.with_name("holds")
    worker = WorkerProcess(ledger.with_name("evalpool.worker.log"), monitor.__name__, **{monitor.HOLDS: str(holds)})
    stack = None
    try:
        stack = Stack(worker.wait_ready(), engine_client, ledger, holds)
        stack.warm_up()
        for name in hostile_env:
            del os.environ[name]
        os.environ.update(before)
        yield stack
    finally:
        if stack is not None:
            stack.close()
        if worker.process.poll() is None:
            worker.stop()
        eventually(lambda: not containers(engine_client, worker.pid))


@pytest.fixture
def stack(one_stack: Stack, hostile_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Stack:
    """The same worker, which the settings of this test name."""
    for name, value in hostile_env.items():
        monkeypatch.setenv(name, value)
    return one_stack
