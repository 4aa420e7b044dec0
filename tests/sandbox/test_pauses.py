"""Sandboxes that are paused from outside while a program runs: this time does not count against the program."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import docker
import pytest
from docker.errors import APIError

from evalpool.schemas import JobSpec, Limits, Result, Settings, Verdict
from evalpool.schemas.lease import Lease
from evalpool.schemas.settings import settings
from evalpool.worker.artifacts import Artifacts
from evalpool.worker.evaluation import evaluate
from evalpool.worker.pool import Pool
from evalpool.worker.sandbox.base import Box, Outcome, Shape
from evalpool.worker.sandbox.docker import GRACE_SECONDS, SLACK_SECONDS, DockerBox
from evalpool.worker.sandbox.engine import Engine
from evalpool.worker.sandbox.exec import ExecBox
from evalpool.worker.turn import PATIENCE
from tests.conftest import containers, freeze
from tests.sandbox.conftest import SHAPE
from tests.sandbox.test_contract import bash, python

pytestmark = pytest.mark.docker

WALL = 10.0
"""Long enough to find the program and pause it on a busy machine."""
ATTEMPTS = 5
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


def named(name: str, code: str) -> str:
    """Let a program rename its process when its first line runs: a pause before that would tell nothing."""
    return f"open('/proc/self/comm', 'w').write({name!r})\n{code}"


def by_engine(client: docker.DockerClient, box: str, *, stop: bool) -> None:
    if stop:
        freeze(client, box)
    else:
        client.api.unpause(box)


def by_signal(client: docker.DockerClient, box: str, *, stop: bool) -> None:
    processes = client.api.top(box, "-eo pid")["Processes"]
    for (pid,) in processes:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGSTOP if stop else signal.SIGCONT)


async def pause(box: Box, client: docker.DockerClient, name: str, seconds: float, how: How = by_engine) -> bool:
    """Pause a sandbox for some seconds, once it has a process with this name.

    Return whether the pause began early in the program's time. The engine may need many seconds for it on a busy
    machine, and a program that has used up its time by then tells nothing about pauses.
    """
    called = time.monotonic()

    def running() -> bool:
        return any(name == process for _, process in client.api.top(box.id, "-eo pid,comm")["Processes"])

    async with asyncio.timeout(60):
        while not await asyncio.to_thread(running):
            await asyncio.sleep(0.01)
    await asyncio.to_thread(how, client, box.id, stop=True)
    early = time.monotonic() - called < WALL / 2
    await asyncio.sleep(seconds)
    await asyncio.to_thread(how, client, box.id, stop=False)
    return early


async def paused(
    box: Box,
    client: docker.DockerClient,
    how: How = by_engine,
    *,
    patience: float = PATIENCE * WALL,
) -> Outcome:
    """Run a program that is paused for longer than its wall limit, again if the pause began too late."""
    for attempt in range(ATTEMPTS):
        name = f"waits-{attempt}"  # a program that ran out of time may still be there
        run = asyncio.create_task(box.run(python(named(name, UNTIL_PAUSED), limits=LIMITS, patience=patience)))
        early = await pause(box, client, name, WALL + 1, how)
        outcome = await run
        if early:
            return outcome
    raise AssertionError(f"No pause began in time in {ATTEMPTS} attempts.")


@pytest.mark.parametrize("how", [by_engine, by_signal])
async def test_a_pause_beyond_the_wall_limit_is_reported(
    box: DockerBox, engine_client: docker.DockerClient, how: How
) -> None:
    outcome = await paused(box, engine_client, how, patience=0)
    assert outcome.ended == "wall"
    assert WALL < outcome.paused_seconds < outcome.wall_seconds
    assert outcome.cpu_seconds < LIMITS.cpu_seconds


@pytest.mark.parametrize("how", [by_engine, by_signal])
async def test_a_pause_does_not_count_against_a_program_with_patience(
    box: DockerBox, engine_client: docker.DockerClient, how: How
) -> None:
    outcome = await paused(box, engine_client, how)
    assert (outcome.ended, outcome.stdout) == ("itself", b"gone on\n")
    assert outcome.paused_seconds > WALL


async def test_a_pause_of_a_container_without_an_agent_is_reported(
    engine: Engine, engine_client: docker.DockerClient
) -> None:
    box = ExecBox(SHAPE, engine)
    await box.start()
    try:
        patient = await paused(box, engine_client)
        assert (patient.ended, patient.stdout) == ("itself", b"gone on\n")
        assert patient.paused_seconds > WALL
        hurried = await paused(box, engine_client, patience=0)
        assert hurried.ended == "wall"
        assert hurried.paused_seconds > 0
    finally:
        await box.close()


async def test_a_program_that_stops_itself_does_not_count_as_paused(box: DockerBox) -> None:
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
    box = DockerBox(SHAPE, engine, settings=settings())
    await box.start()
    try:
        limits = Limits(cpu_seconds=60, wall_seconds=3, output_bytes=16 << 20)
        outcome = await box.run(python(HOSTILE[kind], limits=limits))
    finally:
        await box.close()
    assert (outcome.ended, outcome.paused_seconds) == ("wall", 0)


async def disturbed(engine: Engine, client: docker.DockerClient, seconds: float) -> tuple[Result, list[str]] | None:
    """Evaluate a job whose sandbox is paused in its first run; return its result and the sandboxes that were created,
    in order, or None if the pause began too late."""
    made: list[Box] = []

    async def make(shape: Shape) -> Box:
        sandbox = DockerBox(shape, engine, settings=settings())
        await sandbox.start()
        made.append(sandbox)
        return sandbox

    code = named("counts", "import time\nfor _ in range(70): time.sleep(0.1)\nprint('done')")
    spec = JobSpec(code=code, limits=LIMITS)
    lease = Lease(job_id="b-000000", batch_id="b", spec=spec, attempt=1, created_at=0, started_at=0)
    pool = Pool(make, 1, 100, spare=0)
    try:
        job = asyncio.create_task(evaluate(lease, pool, Artifacts(), Settings()))
        while not made:
            await asyncio.sleep(0.01)
        early = True
        with suppress(APIError):  # a sandbox that was given up no longer exists
            early = await pause(made[0], client, "counts", seconds)
        result = await job
    finally:
        await pool.close()
    return (result, [box.id for box in made]) if early else None


@pytest.mark.parametrize("extra", [1, SLACK_SECONDS + GRACE_SECONDS + 3], ids=["short", "long"])
async def test_a_job_whose_sandbox_was_paused_gets_the_verdict_of_an_undisturbed_run(
    engine: Engine, engine_client: docker.DockerClient, extra: float
) -> None:
    """In the long pause the worker gives the sandbox up, and destroys it while it is paused."""
    for _ in range(ATTEMPTS):
        if found := await disturbed(engine, engine_client, WALL + extra):
            break
    assert found, f"No pause began in time in {ATTEMPTS} attempts."
    result, made = found
    assert (result.verdict, result.stdout) == (Verdict.PASSED, "done\n")
    assert result.sandbox_id != made[0]
    assert made[0] not in containers(engine_client)
