"""Past one machine: workers that have nothing in common but a Redis and a PostgreSQL, each in a network of its own."""

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest

from evalpool.schemas.database import Database
from evalpool.schemas.store import Store
from tests.conftest import missing
from tests.faults.fleet import Fleet
from tests.faults.jobs import mixed
from tests.faults.servers import Missing, PostgresServer, RedisServer

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Network:
    """A bridge with an address of ours, and the names of the networks behind it."""

    address: str
    subnet: str
    names: tuple[str, ...]


@pytest.fixture
def network() -> Iterator[Network]:
    """Two network namespaces on one bridge, which reach each other and this host, and nothing else."""
    if os.getuid() or shutil.which("ip") is None:
        missing("no network namespaces can be made here: that needs root and iproute2")
    mark, octet = secrets.token_hex(3), 16 + secrets.randbelow(200)
    made = Network(f"10.213.{octet}.1", f"10.213.{octet}.0/24", (f"ev{mark}a", f"ev{mark}b"))
    bridge = f"ev{mark}"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{made.address}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(made.names, 2):
            _ip("netns", "add", name)
            _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{name}v", "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"10.213.{octet}.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield made
    except subprocess.CalledProcessError as error:
        missing(f"no network namespaces can be made here: {error.stderr}")
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def test_two_workers_in_two_networks_share_a_batch(
    network: Network, engine_client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the network of one worker is cut off, the other one finishes its jobs."""
    try:
        postgres = PostgresServer(listen=f"127.0.0.1,{network.address}")
    except Missing as error:
        missing(str(error))
    broker = RedisServer(tmp_path / "redis", network.address)
    try:
        postgres.trust(network.subnet)
        postgres.start().execute("CREATE DATABASE shared")
        broker.start()
        url = postgres.url("shared", network.address)
        monkeypatch.setenv("EVALPOOL_REDIS_URL", broker.url)
        monkeypatch.setenv("EVALPOOL_DATABASE_URL", url)
        fleet = Fleet(
            Store(Database(url.replace("postgresql://", "postgresql+psycopg://", 1))), broker, engine_client, tmp_path
        )
        try:
            _share(fleet, network)
        finally:
            fleet.close()
            fleet.store.database.close()
    finally:
        broker.kill()
        postgres.close()


def _share(fleet: Fleet, network: Network) -> None:
    for name in network.names:
        with _inside(name):
            fleet.start(ready=False)
    for worker in fleet.workers:
        worker.wait_ready()
    both = fleet.submit(mixed(40, seconds=0.1))
    fleet.wait_done()
    assert {_pid(result.worker) for result in both.results()} == {worker.pid for worker in fleet.workers}
    fleet.submit(mixed(40, seconds=0.1))
    fleet.wait_done(55)
    _ip("-n", network.names[0], "link", "set", "eth0", "down")
    fleet.wait_done()
    _ip("-n", network.names[0], "link", "set", "eth0", "up")
    fleet.finish()


def _pid(name: str | None) -> int:
    return int((name or "").rpartition("-")[2])


@contextmanager
def _inside(name: str) -> Iterator[None]:
    """Let the processes that this thread starts meanwhile use this network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as home, Path(f"/var/run/netns/{name}").open() as there:
        assert libc.setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(home.fileno(), CLONE_NEWNET) == 0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
