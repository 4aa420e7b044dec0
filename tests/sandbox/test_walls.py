"""Walls of a container: memory in sockets is limited, volumes are refused, and no note reaches the next program."""

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import docker
import pytest

from evalpool.schemas import Limits, SetupError
from evalpool.schemas.settings import Settings, settings
from evalpool.worker.sandbox.base import Box
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.sandbox.engine import OWNER, Engine, owner
from evalpool.worker.sandbox.exec import ExecBox
from evalpool.worker.sandbox.hardening import options, socket_bytes
from tests.conftest import missing
from tests.sandbox.conftest import SHAPE
from tests.sandbox.test_contract import bash, python

pytestmark = pytest.mark.docker

MIB = 64
MOST = 120
"""How much the programs try to hold in sockets, in MiB: more than the memory limit, but no burden for the machine."""
FILL = """
import socket, sys
held, total, most = [], 0, int(sys.argv[2]) << 20
def pairs(family):
    if family == "unix":
        while True: yield socket.socketpair()
    server = socket.create_server(("127.0.0.1", 0))
    while True:
        yield socket.create_connection(server.getsockname()), server.accept()[0]
def send(one):
    global total
    one.setblocking(False)
    try:
        while total < most: total += one.send(bytes(1 << 15))
    except OSError: pass
family = sys.argv[1]
if family == "udp":
    for _ in range(40):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        held.append(receiver)
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for _ in range(100):
            try: sender.sendto(bytes(60000), receiver.getsockname())
            except OSError: pass
        sender.close()
    for receiver in held:
        try:
            while total < most: total += len(receiver.recv(1 << 16))
        except OSError: pass
else:
    for pair, _ in zip(pairs(family), range(50)):
        held.append(pair)
        for one in pair:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            send(one)
print(total >> 20)
"""


@pytest.fixture(params=[DockerBox, ExecBox], ids=["agent", "exec"])
async def small(request: pytest.FixtureRequest, engine: Engine) -> AsyncIterator[Box]:
    """A small container, of both kinds."""
    shape = replace(SHAPE, memory_mib=MIB)
    made: Box = DockerBox(shape, engine, settings=settings()) if request.param is DockerBox else ExecBox(shape, engine)
    await made.start()
    yield made
    await made.close()


@pytest.mark.parametrize("family", ["tcp", "udp", "unix"])
async def test_sockets_hold_no_more_than_the_sandbox_may(small: Box, family: str) -> None:
    """Version 2 of cgroups counts the buffers of sockets as memory; version 1 counts those of TCP and UDP apart."""
    outcome = await small.run(python(FILL, args=(family, str(MOST)), limits=Limits(cpu_seconds=20, wall_seconds=100)))
    if outcome.oom_kills:
        return
    assert outcome.exit_code == 0, outcome.stderr
    assert int(outcome.stdout) <= MIB


async def test_servers_on_localhost_work_within_the_limit_on_sockets(small: Box) -> None:
    code = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
def echo(connection):
    while data := connection.recv(1 << 16): connection.sendall(data)
    connection.close()
def serve():
    for _ in range(20): threading.Thread(target=echo, args=server.accept()[:1]).start()
threading.Thread(target=serve).start()
def ask(seen):
    with socket.create_connection(server.getsockname()) as client:
        threading.Thread(target=lambda: [client.sendall(bytes(1 << 20)), client.shutdown(1)]).start()
        size = 0
        while data := client.recv(1 << 16): size += len(data)
        seen.append(size)
seen = []
clients = [threading.Thread(target=ask, args=(seen,)) for _ in range(20)]
for client in clients: client.start()
for client in clients: client.join()
print(set(seen), len(seen))
"""
    limits = Limits(cpu_seconds=60, wall_seconds=100, processes=64)
    outcome = await small.run(python(code, limits=limits))
    assert outcome.stdout == b"{1048576} 20\n", outcome


def test_the_limit_on_sockets_follows_the_memory_of_a_small_sandbox() -> None:
    assert [socket_bytes(replace(SHAPE, memory_mib=mib)) >> 20 for mib in (16, 64, 512)] == [4, 16, 16]


@pytest.fixture
def with_volumes(engine_client: docker.DockerClient) -> Iterator[str]:
    """The usual image, with two volumes."""
    name = f"evalpool-test/volumes-{secrets.token_hex(4)}"
    container = engine_client.api.create_container(SHAPE.image, command=["true"], entrypoint=[])["Id"]
    try:
        engine_client.api.commit(container, name, "1", changes="VOLUME /data /srv/more")
    finally:
        engine_client.api.remove_container(container, v=True)
    yield f"{name}:1"
    engine_client.api.remove_image(f"{name}:1", force=True)


@pytest.mark.parametrize("kind", ["agent", "exec"])
async def test_an_image_with_volumes_is_refused_with_its_name_and_a_remedy(
    engine: Engine, with_volumes: str, kind: str
) -> None:
    digest = engine.api.inspect_image(with_volumes)["Id"]
    shape = replace(SHAPE, image=f"{with_volumes} {digest}")
    made = DockerBox(shape, engine, settings=settings()) if kind == "agent" else ExecBox(shape, engine)
    refused = rf"image: {with_volumes} declares volumes \(/data, /srv/more\).*without VOLUME.*docker import"
    try:
        with pytest.raises(SetupError, match=refused):
            await made.start()
    finally:
        await made.close()


def test_a_container_is_removed_with_its_volumes(engine: Engine, with_volumes: str) -> None:
    body = options(replace(SHAPE, image=with_volumes), {OWNER: owner()})
    container = engine.api.create_container_from_config(body)["Id"]
    made = {mount["Name"] for mount in engine.api.inspect_container(container)["Mounts"]}
    assert len(made) == 2
    engine.remove(container)
    left = {volume["Name"] for volume in engine.api.volumes()["Volumes"] or []}
    assert not made & left


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
        "import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('::1', 9))",
        "import socket\ntry: socket.create_connection(('198.51.100.1', 9), 2)\nexcept OSError: pass",
        "import socket\ntry: socket.create_connection(('127.0.0.1', 9), 2)\nexcept OSError: pass",
    ],
)
async def test_a_sandbox_whose_packet_counters_have_moved_is_not_used_again(box: DockerBox, code: str) -> None:
    outcome = await box.run(python(code))
    if b"Cannot assign" in outcome.stderr:  # there is no IPv6 here, and so no counter for it
        return
    assert outcome.exit_code == 0, outcome.stderr
    assert not await box.reset()


async def test_programs_that_send_no_packet_leave_a_sandbox_usable(box: DockerBox) -> None:
    for code in (
        "import asyncio; asyncio.run(asyncio.sleep(0.01))",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing as m\nif __name__ == '__main__':\n    with m.Pool(2) as p: print(p.map(abs, [1]))",
        "import socket; s = socket.create_server(('127.0.0.1', 0)); u = socket.socketpair()",
    ):
        outcome = await box.run(python(code))
        assert outcome.exit_code == 0, outcome.stderr
        assert await box.reset()
    assert (await box.run(bash("sync; echo on"))).stdout == b"on\n"
    assert await box.reset()


async def test_every_program_has_random_numbers_of_its_own_where_numpy_is_preloaded(engine: Engine) -> None:
    image = "evalpool/notebook:3.11"
    if not engine.has(image):
        missing(f"no image {image} here")
    shape = replace(SHAPE, image=image, memory_mib=256)
    box = DockerBox(shape, engine, settings=Settings(preload=("numpy",)))
    await box.start()
    draw = (
        "import json, os, numpy, random\n"
        "drawn = [numpy.random.rand(), random.random(), float(numpy.random.default_rng().random())]\n"
        "numpy.random.seed(1)\n"
        "ends = os.pipe()\n"
        "if not os.fork(): os.write(ends[1], b'%.9f' % numpy.random.rand()); os._exit(0)\n"
        "print(json.dumps([drawn, [numpy.random.rand(), os.read(ends[0], 99).decode()]]))"
    )
    try:
        seen = []
        for _ in range(3):
            outcome = await box.run(python(draw))
            assert outcome.exit_code == 0, outcome.stderr
            seen.append(json.loads(outcome.stdout))
            assert await box.reset()
    finally:
        await box.close()
    numbers = [number for drawn, _ in seen for number in drawn]
    assert len(set(numbers)) == len(numbers)
    repeatable = [0.417022004702574, "0.417022005"]  # what a program draws after it has set the seed itself
    assert [seeded for _, seeded in seen] == [repeatable] * 3
