"""Metrics against programs that are known to use so much and no more."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from schemas import JobSpec, Limits, Verdict
from schemas.settings import settings
from tests.sandbox.conftest import SHAPE
from tests.sandbox.test_contract import python
from worker.sandbox.base import Shape
from worker.sandbox.docker import DockerSandbox
from worker.sandbox.engine import Engine
from worker.tools.judge import judge

pytestmark = pytest.mark.docker

# ruff: noqa: E501 - programs are data

BURN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Four loops that want every core."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


async def test_cpu_time_is_that_of_all_processes(box: DockerSandbox) -> None:
    code = f"import os\npid = os.fork()\n{BURN.format(0.5)}\nif pid: os.waitpid(pid, 0)"
    outcome = await box.run(python(code))
    assert outcome.cpu_seconds == pytest.approx(1.0, rel=0.1)


async def test_cpu_time_of_children_that_nobody_waits_for_counts_too(box: DockerSandbox) -> None:
    code = "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nif not os.fork():\n"
    code += "".join(f"    {line}\n" for line in BURN.format(0.5).splitlines()) + "    os._exit(0)\ntime.sleep(3)"
    outcome = await box.run(python(code))
    assert outcome.cpu_seconds == pytest.approx(0.5, rel=0.15)


async def test_memory_is_what_was_touched_and_each_run_has_its_own_peak(engine: Engine) -> None:
    box = DockerSandbox(Shape(SHAPE.image, 512, 64, 64), engine, settings=settings())
    await box.start()
    try:
        peaks = []
        for mib in (0, 200, 0, 100, 0):
            outcome = await box.run(python(f"x = bytearray({mib} << 20)"))
            peaks.append(outcome.memory_bytes / (1 << 20))
            assert await box.reset()
        interpreter = peaks[0]
        assert 4 < interpreter < 30
        assert peaks[1] - interpreter == pytest.approx(200, rel=0.1)
        assert peaks[3] - interpreter == pytest.approx(100, rel=0.1)
        assert peaks[2] == pytest.approx(interpreter, rel=0.25)
        assert peaks[4] == pytest.approx(interpreter, rel=0.25)
    finally:
        await box.close()


async def test_memory_of_several_processes_is_summed(box: DockerSandbox) -> None:
    code = "import os, time\nfor _ in range(3):\n    if not os.fork():\n        x = bytearray(20 << 20); time.sleep(1); os._exit(0)\nos.wait()"
    outcome = await box.run(python(code))
    assert outcome.memory_bytes / (1 << 20) > 60


async def test_sleep_costs_no_cpu_time(box: DockerSandbox) -> None:
    outcome = await box.run(python("import time; time.sleep(1)"))
    assert outcome.cpu_seconds < 0.1
    assert outcome.wall_seconds >= 1


async def test_processes_alive_at_once_are_seen(box: DockerSandbox) -> None:
    code = "import os, time\nfor _ in range(5):\n    if not os.fork(): time.sleep(1); os._exit(0)\ntime.sleep(0.5)"
    outcome = await box.run(python(code))
    assert outcome.processes == 6


async def test_a_crowded_machine_makes_no_false_verdicts(engine: Engine, busy_machine: None) -> None:
    spec = JobSpec(code=BURN.format(0.5), limits=Limits(cpu_seconds=2))
    boxes = [DockerSandbox(SHAPE, engine, settings=settings()) for _ in range(2)]

    async def several(box: DockerSandbox) -> list[Verdict]:
        await box.start()
        verdicts = []
        for _ in range(8):
            verdicts.append(judge(await box.run(python(spec.code, limits=spec.limits)), spec, None)[0])
            assert await box.reset()
        await box.close()
        return verdicts

    for verdicts in await asyncio.gather(*map(several, boxes)):
        assert verdicts == [Verdict.PASSED] * 8


async def test_the_edge_of_the_cpu_limit_is_where_it_says(box: DockerSandbox) -> None:
    limits = Limits(cpu_seconds=1)
    within = await box.run(python(BURN.format(0.9), limits=limits))
    assert (within.ended, within.exit_code) == ("itself", 0)
    assert await box.reset()
    beyond = await box.run(python(BURN.format(1.2), limits=limits))
    assert beyond.ended == "cpu"
    assert beyond.cpu_seconds == pytest.approx(1.0, abs=0.1)


async def test_the_cost_of_a_reset_is_not_the_next_programs(box: DockerSandbox) -> None:
    litter = "import os\nfor i in range(300): os.mkdir('a'); os.chdir('a')\nfor i in range(4000): os.close(os.open(str(i), os.O_CREAT))"
    assert (await box.run(python(litter))).exit_code == 0
    assert await box.reset()
    assert (await box.run(python("pass"))).cpu_seconds < 0.1


CROWD = "import os\nfor _ in range(7):\n    if not os.fork():\n        while True: pass\n"
"""Seven processes that want the sandbox's one CPU, whatever the machine has."""


async def test_a_program_that_wanted_a_cpu_is_told_from_one_that_waited(box: DockerSandbox) -> None:
    limits = Limits(cpu_seconds=60, wall_seconds=1)
    starved = await box.run(python(CROWD + "while True: pass", limits=limits))
    assert starved.ended == "wall"
    assert starved.delay_seconds > 0.1
    await box.reset()
    waiting = await box.run(python("import time; time.sleep(60)", limits=limits))
    assert waiting.ended == "wall"
    assert waiting.delay_seconds < starved.delay_seconds


async def test_what_it_waited_for_a_cpu_is_given_to_it_where_that_is_asked_for(box: DockerSandbox) -> None:
    limits = Limits(cpu_seconds=60, wall_seconds=1)
    hurried = await box.run(python(CROWD + BURN.format(0.6), limits=limits))
    assert hurried.ended == "wall"
    await box.reset()
    patient = await box.run(python(CROWD + BURN.format(0.6), limits=limits, patience=60))
    assert (patient.ended, patient.exit_code) == ("itself", 0)
    await box.reset()
    sleeper = await box.run(python("import time; time.sleep(60)", limits=limits, patience=60))
    assert sleeper.ended == "wall"
    assert sleeper.wall_seconds < 30
