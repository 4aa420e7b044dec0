"""Sandboxes that are paused from outside while a program runs: this time does not count against the program."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import docker
import pytest
from docker.errors import APIError

from schemas import JobSpec, Limits, Settings, Verdict
from schemas.lease import Lease
from schemas.settings import settings
from tests.conftest import containers
from tests.sandbox.conftest import SHAPE
from tests.sandbox.test_contract import bash, python
from worker.artifacts import Artifacts
from worker.evaluation import PATIENCE, evaluate
from worker.pool import Pool
from worker.sandbox.base import Sandbox, Shape
from worker.sandbox.docker import GRACE_SECONDS, SLACK_SECONDS, DockerSandbox
from worker.sandbox.engine import Engine
from worker.sandbox.exec import ExecSandbox

pytestmark = pytest.mark.docker

WALL = 3.0
LIMITS = Limits(cpu_seconds=60, wall_seconds=WALL)
UNTIL_PAUSED = """
import time
before = now = time.monotonic()
while now - before < 1:
    time.sleep(0.01)
    before, now = now, time.monotonic()
time.sleep(0.5)
print("gone on")
"""
"""Ends soon after it was paused for more than a second, and not before. It waits a moment first: if it ended at once,
the agent might see that before it checks the time."""
How = Callable[..., None]


def by_engine(client: docker.DockerClient, box: str, *, stop: bool) -> None:
    (client.api.pause if stop else client.api.unpause)(box)


def by_signal(client: docker.DockerClient, box: str, *, stop: bool) -> None:
    processes = client.api.top(box, "-eo pid")["Processes"]
    for (pid,) in processes:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGSTOP if stop else signal.SIGCONT)


async def pause(
    box: Sandbox, client: docker.DockerClient, seconds: float, how: How = by_engine, *, words: str = ""
) -> None:
    """Pause a sandbox for so long, once a second process, or one with these words in its command, runs in it."""

    def running() -> bool:
        processes = client.api.top(box.id)["Processes"]
        return any(words in " ".join(process) for process in processes[1:])

    async with asyncio.timeout(60):
        while not await asyncio.to_thread(running):
            await asyncio.sleep(0.01)
    await asyncio.to_thread(how, client, box.id, stop=True)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(how, client, box.id, stop=False)


@pytest.mark.parametrize("how", [by_engine, by_signal])
async def test_a_pause_beyond_the_wall_limit_is_reported(
    box: DockerSandbox, engine_client: docker.DockerClient, how: How
) -> None:
    run = asyncio.create_task(box.run(python(UNTIL_PAUSED, limits=LIMITS)))
    await pause(box, engine_client, WALL + 1, how)
    outcome = await run
    assert outcome.ended == "wall"
    assert WALL < outcome.paused_seconds < outcome.wall_seconds
    assert outcome.cpu_seconds < LIMITS.cpu_seconds


async def test_a_pause_does_not_count_against_a_program_with_patience(
    box: DockerSandbox, engine_client: docker.DockerClient
) -> None:
    run = asyncio.create_task(box.run(python(UNTIL_PAUSED, limits=LIMITS, patience=PATIENCE * WALL)))
    await pause(box, engine_client, WALL + 1)
    outcome = await run
    assert (outcome.ended, outcome.stdout) == ("itself", b"gone on\n")
    assert outcome.paused_seconds > WALL


async def test_a_pause_of_a_container_without_an_agent_is_reported(
    engine: Engine, engine_client: docker.DockerClient
) -> None:
    box = ExecSandbox(SHAPE, engine)
    await box.start()
    try:
        run = asyncio.create_task(box.run(python(UNTIL_PAUSED, limits=LIMITS, patience=PATIENCE * WALL)))
        await pause(box, engine_client, WALL + 1, words="python3 main.py")
        patient = await run
        assert (patient.ended, patient.stdout) == ("itself", b"gone on\n")
        assert patient.paused_seconds > WALL
        run = asyncio.create_task(box.run(python(UNTIL_PAUSED, limits=LIMITS)))
        await pause(box, engine_client, WALL + 1, words="python3 main.py")
        hurried = await run
        assert hurried.ended == "wall"
        assert hurried.paused_seconds > 0
    finally:
        await box.close()


async def test_a_program_that_stops_itself_does_not_count_as_paused(box: DockerSandbox) -> None:
    outcome = await box.run(bash("kill -STOP $$", limits=Limits(wall_seconds=2), patience=60))
    assert (outcome.ended, outcome.paused_seconds) == ("wall", 0)


HOSTILE = {
    "sleeps": "import time; time.sleep(1000)",
    "threads": """
import threading
def spin():
    while True: pass
for _ in range(20): threading.Thread(target=spin).start()
""",
    "forks": """
import os
for _ in range(20):
    if not os.fork():
        while True: pass
while True:
    pid = os.fork()
    if not pid: os._exit(0)
    os.waitpid(pid, 0)
""",
    "writes": """
import os
os.fork(), os.fork()
while True: os.write(1, b"x")
""",
    "memory": """
import os
held = None
for _ in range(4):
    if not os.fork(): break
else:
    held = bytearray(90 << 20)
while True:
    if held:
        for at in range(0, len(held), 4096): held[at] = 1
    else:
        for folder, _, names in os.walk("/usr"):
            for name in names:
                try: open(os.path.join(folder, name), "rb").read(1 << 20)
                except OSError: pass
""",
    "copies": """
import os
held = bytearray(90 << 20)
for at in range(0, len(held), 4096): held[at] = 1
while True:
    children = [os.fork() or os._exit(0) for _ in range(20)]
    for child in children: os.waitpid(child, 0)
""",
}
"""Programs that keep the sandbox busy in ways that might keep the agent from reading the clock."""


@pytest.mark.parametrize("kind", HOSTILE)
async def test_no_program_can_pretend_to_have_been_paused(engine: Engine, kind: str) -> None:
    box = DockerSandbox(SHAPE, engine, settings=settings())
    await box.start()
    try:
        limits = Limits(cpu_seconds=60, wall_seconds=WALL, output_bytes=16 << 20)
        outcome = await box.run(python(HOSTILE[kind], limits=limits))
    finally:
        await box.close()
    assert (outcome.ended, outcome.paused_seconds) == ("wall", 0)


@pytest.fixture
async def made() -> list[Sandbox]:
    """The sandboxes of the pool, in the order in which they were created."""
    return []


@pytest.fixture
async def pool(engine: Engine, made: list[Sandbox]) -> AsyncIterator[Pool]:
    """A pool of real sandboxes with one slot."""

    async def make(shape: Shape) -> Sandbox:
        sandbox = DockerSandbox(shape, engine, settings=settings())
        await sandbox.start()
        made.append(sandbox)
        return sandbox

    pool = Pool(make, 1, 100, spare=0)
    yield pool
    await pool.close()


@pytest.mark.parametrize("seconds", [WALL + 1, WALL + SLACK_SECONDS + GRACE_SECONDS + 3], ids=["short", "long"])
async def test_a_job_whose_sandbox_was_paused_gets_the_verdict_of_an_undisturbed_run(
    pool: Pool, made: list[Sandbox], engine_client: docker.DockerClient, seconds: float
) -> None:
    """In the long pause the worker gives the sandbox up, and destroys it while it is paused."""
    code = "import time\nfor _ in range(20): time.sleep(0.1)\nprint('done')"
    spec = JobSpec(code=code, limits=LIMITS)
    lease = Lease(job_id="b-000000", batch_id="b", spec=spec, attempt=1, created_at=0, started_at=0)
    job = asyncio.create_task(evaluate(lease, pool, Artifacts(), Settings()))
    while not made:
        await asyncio.sleep(0.01)
    with suppress(APIError):  # a sandbox that was given up no longer exists
        await pause(made[0], engine_client, seconds)
    result = await job
    assert (result.verdict, result.stdout) == (Verdict.PASSED, "done\n")
    assert result.sandbox_id != made[0].id
    await pool.close()
    assert made[0].id not in containers(engine_client)
