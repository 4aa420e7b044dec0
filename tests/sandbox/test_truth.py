"""Metrics of programs whose use of time and memory is known."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import cycle

import pytest

from evalpool.schemas import JobSpec, Limits, Verdict
from evalpool.schemas.settings import settings
from evalpool.worker.judge.judge import judge
from evalpool.worker.sandbox.agent import watch
from evalpool.worker.sandbox.agent.kernel import Counters
from evalpool.worker.sandbox.agent.watch import Watch
from evalpool.worker.sandbox.base import Shape
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.sandbox.engine import Engine
from tests.conftest import PATIENCE
from tests.sandbox.conftest import SHAPE
from tests.sandbox.test_contract import python

pytestmark = pytest.mark.docker

# ruff: noqa: E501 - programs are data

BURN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Run four busy loops beside the test."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


async def test_cpu_time_is_that_of_all_processes(box: DockerBox) -> None:
    code = f"import os\npid = os.fork()\n{BURN.format(0.5)}\nif pid: os.waitpid(pid, 0)"
    outcome = await box.run(python(code))
    assert outcome.cpu_seconds == pytest.approx(1.0, rel=0.1)


async def test_cpu_time_of_children_that_nobody_waits_for_counts_too(box: DockerBox) -> None:
    code = "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\npid = os.fork()\nif not pid:\n"
    code += "".join(f"    {line}\n" for line in BURN.format(0.5).splitlines()) + "    os._exit(0)\n"
    code += "while os.path.exists(f'/proc/{pid}'): time.sleep(0.1)"
    outcome = await box.run(python(code, limits=Limits(wall_seconds=PATIENCE)))
    assert outcome.cpu_seconds == pytest.approx(0.5, rel=0.15)


async def test_memory_is_what_was_touched_and_each_run_has_its_own_peak(engine: Engine) -> None:
    box = DockerBox(Shape(SHAPE.image, 512, 64, 64), engine, settings=settings())
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


async def test_memory_of_several_processes_is_summed(box: DockerBox) -> None:
    code = "import os, time\nfor _ in range(3):\n    if not os.fork():\n        x = bytearray(20 << 20); time.sleep(1); os._exit(0)\nos.wait()"
    outcome = await box.run(python(code))
    assert outcome.memory_bytes / (1 << 20) > 60


async def test_sleep_costs_no_cpu_time(box: DockerBox) -> None:
    outcome = await box.run(python("import time; time.sleep(1)"))
    assert outcome.cpu_seconds < 0.1
    assert outcome.wall_seconds >= 1


async def test_processes_alive_at_once_are_seen(box: DockerBox) -> None:
    code = "import os, time\nfor _ in range(5):\n    if not os.fork(): time.sleep(1); os._exit(0)\ntime.sleep(0.5)"
    outcome = await box.run(python(code))
    assert outcome.processes == 6


async def test_a_busy_machine_causes_no_false_verdicts(engine: Engine, busy_machine: None) -> None:
    spec = JobSpec(code=BURN.format(0.5), limits=Limits(cpu_seconds=2, wall_seconds=PATIENCE))
    boxes = [DockerBox(SHAPE, engine, settings=settings()) for _ in range(2)]

    async def several(box: DockerBox) -> list[Verdict]:
        await box.start()
        verdicts = []
        for _ in range(8):
            verdicts.append(judge(await box.run(python(spec.code, limits=spec.limits)), spec, None)[0])
            assert await box.reset()
        await box.close()
        return verdicts

    for verdicts in await asyncio.gather(*map(several, boxes)):
        assert verdicts == [Verdict.PASSED] * 8


async def test_programs_just_below_and_above_the_cpu_limit_are_judged_right(box: DockerBox) -> None:
    limits = Limits(cpu_seconds=1, wall_seconds=PATIENCE)
    within = await box.run(python(BURN.format(0.9), limits=limits))
    assert (within.ended, within.exit_code) == ("itself", 0)
    assert await box.reset()
    beyond = await box.run(python(BURN.format(1.2), limits=limits))
    assert beyond.ended == "cpu"
    assert beyond.cpu_seconds == pytest.approx(1.0, abs=0.1)


async def test_a_reset_is_not_billed_to_the_next_program(box: DockerBox) -> None:
    litter = "import os\nfor i in range(300): os.mkdir('a'); os.chdir('a')\nfor i in range(4000): os.close(os.open(str(i), os.O_CREAT))"
    assert (await box.run(python(litter))).exit_code == 0
    assert await box.reset()
    assert (await box.run(python("pass"))).cpu_seconds < 0.1


BIND = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
"""The first lines of programs that must all want the same CPU."""


@pytest.fixture
async def rivals(engine: Engine) -> AsyncIterator[None]:
    """Two other sandboxes that want this CPU all the time."""
    code = BIND + "while True: pass"
    others = [DockerBox(SHAPE, engine, settings=settings()) for _ in range(2)]
    await asyncio.gather(*(other.start() for other in others))
    program = python(code, limits=Limits(cpu_seconds=600, wall_seconds=600))
    runs = [asyncio.create_task(other.run(program)) for other in others]
    async with asyncio.timeout(PATIENCE):
        while any(usage is None or usage.cpu_seconds < 0.3 for usage in (other.usage() for other in others)):
            await asyncio.sleep(0.05)
    yield
    await asyncio.gather(*(other.close() for other in others))
    await asyncio.gather(*runs, return_exceptions=True)


async def test_a_starved_program_is_told_apart_from_a_waiting_one(box: DockerBox, rivals: None) -> None:
    limits = Limits(cpu_seconds=60, wall_seconds=4)
    starved = await box.run(python(BIND + "while True: pass", limits=limits))
    assert starved.ended == "wall"
    assert 0.1 * limits.wall < starved.delay_seconds < limits.wall
    await box.reset()
    waiting = await box.run(python(BIND + "import time; time.sleep(60)", limits=limits))
    assert waiting.ended == "wall"
    assert waiting.delay_seconds < starved.delay_seconds


async def test_a_chain_of_short_processes_can_be_starved_like_a_long_one(box: DockerBox, rivals: None) -> None:
    """A compiler or a script is such a chain: none of its processes runs, or waits, for long."""
    limits = Limits(cpu_seconds=60, wall_seconds=4)
    burn = "end = os.times()[0] + 0.02\nwhile os.times()[0] < end: pass"
    chain = f"{BIND}while True:\n    pid = os.fork()\n    if not pid:\n        exec({burn!r})\n        os._exit(0)\n    os.waitpid(pid, 0)"
    starved = await box.run(python(chain, limits=limits))
    assert starved.ended == "wall"
    assert 0.1 * limits.wall < starved.delay_seconds < limits.wall


async def test_a_program_with_patience_gets_the_time_back_that_it_waited_for_a_cpu(
    box: DockerBox, rivals: None
) -> None:
    limits = Limits(cpu_seconds=60, wall_seconds=4)
    hurried = await box.run(python(BIND + BURN.format(2.4), limits=limits))
    assert hurried.ended == "wall"
    await box.reset()
    patient = await box.run(python(BIND + BURN.format(2.4), limits=limits, patience=5 * PATIENCE))
    assert (patient.ended, patient.exit_code) == ("itself", 0)
    await box.reset()
    sleeper = await box.run(python(BIND + "import time; time.sleep(60)", limits=limits, patience=60))
    assert sleeper.ended == "wall"
    assert sleeper.wall_seconds < 30


CROWD = "import os\nfor _ in range(7):\n    if not os.fork():\n        while True: pass\n"
"""Seven processes that want the sandbox's one CPU, whatever the machine has."""


async def test_waiting_for_its_own_processes_does_not_count_as_starvation(box: DockerBox) -> None:
    """At any time, either the sandbox has a CPU or others keep it from one, so both together take no longer than the run."""
    crowd = await box.run(python(CROWD + "while True: pass", limits=Limits(cpu_seconds=60, wall_seconds=4)))
    assert crowd.ended == "wall"
    assert crowd.delay_seconds + crowd.cpu_seconds < crowd.wall_seconds + 0.2


def test_cpu_time_of_the_sandbox_is_not_counted_as_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, used = Counters(), [6.0]
    monkeypatch.setattr(counters, "cpu_seconds", lambda: used[-1])
    monkeypatch.setattr(counters, "oom_kills", int)  # not those of this machine, where other tests run

    def delay(cpus: float, *looks: tuple[float, float], ready: Sequence[bool] = (True,)) -> float:
        """Return the delay that is noticed. Each look is (seconds since the last one, CPU seconds of the sandbox in them), and
        the program is ready to run at every look or at some of them, in turn."""
        turns = cycle(ready)
        monkeypatch.setattr(watch, "runnable", lambda: next(turns))
        seen = Watch(counters, -1, {"cpus": cpus})
        seen._looked = 0.0  # the seconds since the machine was started would be rounded too coarsely
        for passed, cpu in looks:
            used.append(used[-1] + cpu)
            seen._look(seen._looked + passed)
        return seen.delay

    assert delay(1.0, (0.4, 0.1), (0.4, 0.1)) == pytest.approx(0.6)
    assert delay(1.0, (0.4, 0.1), (0.4, 0.1), ready=[False]) == 0
    assert delay(1.0, *[(0.05, 0.02)] * 100, ready=[True, False, False, True, False]) == pytest.approx(0, abs=1e-9)
    assert delay(1.0, *[(0.05, 0.01)] * 100, ready=[True, True, True, False]) == pytest.approx(100 * (0.0375 - 0.01))
    assert delay(2.0, (0.4, 0.4)) == 0
    assert delay(0.5, (0.4, 0.2)) == 0
    assert delay(1.0, (0.05, 0.1), (0.05, 0.0)) == pytest.approx(0)
    assert delay(1.0, (0.05, 0.0), (0.05, 0.1), (0.05, 0.0), (0.05, 0.1)) == pytest.approx(0)
    used[:] = [0.0]
    assert delay(1.0, (0.4, 0.0)) == 0  # if the CPU time cannot be read
