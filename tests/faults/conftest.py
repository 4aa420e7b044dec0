"""One fault at a time, with real servers. Every test ends with `fleet.finish()`, which runs the audit of `audit.py`."""

import os
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path

import docker
import pytest

from evalpool.schemas.database import Database
from evalpool.schemas.settings import Settings
from evalpool.schemas.store import Store
from tests.conftest import missing
from tests.faults.fleet import Fleet
from tests.faults.proxy import Proxy
from tests.faults.servers import Dockerd, Missing, PostgresServer, RedisServer, free_port

ENGINE = Path("/var/run/docker.sock")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.redis)


PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """A Redis for this test alone, which the settings name."""
    try:
        server = RedisServer(tmp_path / "redis")
    except Missing as error:
        missing(str(error))
    server.start()
    monkeypatch.setenv("EVALPOOL_REDIS_URL", server.url)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A private PostgreSQL for the whole session."""
    try:
        server = PostgresServer()
    except Missing as error:
        missing(str(error))
    server.start()
    yield server
    server.close()


@pytest.fixture
def ledger(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty ledger, which the settings name: in SQLite, or with the parameter `postgresql` in PostgreSQL."""
    if getattr(request, "param", "sqlite") == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        name = f"t{secrets.token_hex(6)}"
        server.execute(f"CREATE DATABASE {name}")
        url = server.url(name)
    else:
        url = f"sqlite:///{tmp_path / 'ledger.db'}"
    monkeypatch.setenv("EVALPOOL_DATABASE_URL", url)
    database = Database(url.replace("postgresql://", "postgresql+psycopg://", 1))
    yield Store(database)
    database.close()


@pytest.fixture
def fleet(
    request: pytest.FixtureRequest,
    ledger: Store,
    broker: RedisServer,
    engine_client: docker.DockerClient,
    tmp_path: Path,
) -> Iterator[Fleet]:
    """A fleet without workers."""
    made = Fleet(ledger, broker, engine_client, tmp_path)
    yield made
    made.close()
    print(made.tails())
    if request.node.stash.get(PASSED, False):
        assert made.audited, "this test has forgotten its audit"


@pytest.fixture
def redis_link(broker: RedisServer) -> Iterator[Proxy]:
    """A proxy in front of that Redis, which can misbehave. A worker uses it with
    `EVALPOOL_REDIS_URL=redis_link.url`."""
    with Proxy((broker.host, broker.port), ("127.0.0.1", free_port())) as proxy:
        yield proxy


@pytest.fixture
def engine_link(tmp_path: Path, engine_client: docker.DockerClient) -> Iterator[Proxy]:
    """A proxy in front of the shared Docker engine, which can misbehave. A worker uses it with
    `DOCKER_HOST=engine_link.url`."""
    upstream = Path(os.environ.get("DOCKER_HOST", f"unix://{ENGINE}").removeprefix("unix://"))
    if not upstream.is_socket():
        missing("the Docker engine is not behind a socket file")
    with Proxy(upstream, tmp_path / "d.sock") as proxy:
        yield proxy


@pytest.fixture(scope="session")
def dockerd(engine_client: docker.DockerClient) -> Iterator[Dockerd]:
    """A private Docker engine, which may be stopped and frozen."""
    try:
        server = Dockerd(Settings.model_fields["image"].default)
    except Missing as error:
        missing(str(error))
    yield server
    server.close()


@pytest.fixture
def own_engine(dockerd: Dockerd, fleet: Fleet) -> Iterator[Dockerd]:
    """The private engine, on which the workers of the fleet run their sandboxes."""
    fleet.env["DOCKER_HOST"] = dockerd.host
    fleet.engine = docker.DockerClient(dockerd.host, timeout=30)
    yield dockerd
    fleet.close()
    fleet.engine.close()
