"""Limits are set on a living sandbox when it is lent, and hold in the kernel for this program and not for the next."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from evalpool.schemas import Limits, SandboxLost
from evalpool.schemas.settings import settings
from evalpool.worker.sandbox import cgroup
from evalpool.worker.sandbox.base import Box, Outcome, Program, Shape
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.sandbox.engine import Engine
from evalpool.worker.sandbox.exec import ExecBox
from evalpool.worker.sandbox.hardening import memory_bytes, process_count, socket_bytes, stack_bytes
from tests.conftest import PATIENCE, containers
from tests.sandbox.conftest import SHAPE
from tests.sandbox.test_contract import bash, python

LARGE, SMALL = replace(SHAPE, memory_mib=512, processes=64), replace(SHAPE, memory_mib=64, processes=8)
HOG = "x = bytearray(200 << 20); print(len(x) >> 20)"
CROWD = """
import os, time
made = 0
try:
    for _ in range(40):
        if not os.fork(): time.sleep(1000)
        made += 1
except BlockingIOError:
    pass
print(made)
"""
WALL = Limits(cpu_seconds=20, wall_seconds=PATIENCE)


def kernel_limits(box: DockerBox | ExecBox) -> dict[str, int]:
    assert box._cgroup is not None
    names = {cgroup.SWAP_1: "swap", cgroup.SOCKETS_1: "sockets", cgroup.PROCESSES: "processes"}
    return {names.get(path.name, "memory"): int(path.read_text()) for path in box._cgroup._limits}


async def ran(box: Box, shape: Shape, program: Program) -> Outcome:
    assert await box.limit(shape)
    outcome = await box.run(program)
    assert await box.reset()
    return outcome


@pytest.fixture(params=["cgroup", "engine"])
async def lent(request: pytest.FixtureRequest, box: DockerBox) -> AsyncIterator[DockerBox]:
    """A container whose limits the worker sets itself, and one whose limits the engine sets."""
    group = box._cgroup
    assert group is not None
    if request.param == "engine":
        box._cgroup = None
    yield box
    box._cgroup = group


async def test_a_sandbox_of_any_sort_takes_other_limits(sandbox: Box) -> None:
    for memory in (64, 512, 128):
        shape = replace(sandbox.shape, memory_mib=memory, processes=memory // 4)
        assert await sandbox.limit(shape)
        assert sandbox.shape == shape
        assert (await sandbox.run(python("print(1)"))).stdout == b"1\n"
        assert await sandbox.reset()


@pytest.mark.docker
async def test_the_memory_limit_is_that_of_the_program_and_not_of_the_one_before(lent: DockerBox) -> None:
    for shape, killed in ((LARGE, 0), (SMALL, 1), (LARGE, 0), (SMALL, 1)):
        outcome = await ran(lent, shape, python(HOG, limits=WALL))
        assert outcome.oom_kills == killed, (shape, outcome)
        assert outcome.stdout == (b"" if killed else b"200\n")


@pytest.mark.docker
async def test_the_process_limit_is_that_of_the_program_and_not_of_the_one_before(lent: DockerBox) -> None:
    for shape, made in ((LARGE, b"40\n"), (SMALL, b"7\n"), (LARGE, b"40\n")):
        # the limit of the user is left out of it
        outcome = await ran(lent, shape, python(CROWD, limits=WALL.model_copy(update={"processes": 64})))
        assert outcome.stdout == made, (shape, outcome)


@pytest.mark.docker
async def test_the_kernel_has_the_limits_that_were_lent(box: DockerBox) -> None:
    for memory, processes in ((512, 64), (16, 3), (1024, 200), (4, 1), (64, 8)):
        shape = replace(SHAPE, memory_mib=memory, processes=processes, extra_mib=memory // 2)
        assert await box.limit(shape)
        found = kernel_limits(box)
        assert found["memory"] == memory_bytes(shape) == found.get("swap", found["memory"])
        assert found["processes"] == process_count(shape)
        assert found.get("sockets", socket_bytes(shape)) == socket_bytes(shape)


@pytest.mark.docker
async def test_the_engine_sets_the_same_limits(lent: DockerBox) -> None:
    assert await lent.limit(LARGE)
    assert await lent.limit(SMALL)
    group, lent._cgroup = lent._cgroup, cgroup.find(await pid_of(lent), lent.id)
    found = kernel_limits(lent)
    assert (found["memory"], found["processes"]) == (memory_bytes(SMALL), process_count(SMALL))
    assert found.get("swap", found["memory"]) == found["memory"]
    assert lent._cgroup is not None
    lent._cgroup.close()
    lent._cgroup = group


async def pid_of(box: DockerBox) -> int:
    return int((await box._engine.call(box._engine.api.inspect_container, box.id))["State"]["Pid"])


@pytest.mark.docker
async def test_the_cgroup_of_another_process_is_left_alone(
    box: DockerBox, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may be on another machine, or count processes in another namespace: its pid is a stranger's here."""
    pid, launch = await pid_of(box), engine.launch
    reniced: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda *given: reniced.append(given[1]))
    monkeypatch.setattr(engine, "launch", lambda options: launch(options)._replace(pid=pid))
    before = kernel_limits(box)
    for made in (DockerBox(LARGE, engine, settings=settings()), ExecBox(LARGE, engine)):
        await made.start()
        try:
            assert made._cgroup is None
            assert await made.limit(replace(LARGE, processes=12))
            assert (await made.run(bash("echo 1"))).stdout == b"1\n"
        finally:
            await made.close()
    assert (kernel_limits(box), reniced) == (before, [])
    assert cgroup.find(pid, box.id[:-1] + ("0" if box.id[-1] == "1" else "1")) is None


@pytest.mark.docker
async def test_limits_that_were_changed_from_outside_are_set_again(box: DockerBox) -> None:
    await box._engine.call(box._engine.update, box.id, 1 << 30, 500, False)
    assert await box.limit(box.shape)
    assert kernel_limits(box)["memory"] == memory_bytes(box.shape)
    assert kernel_limits(box)["processes"] == process_count(box.shape)


@pytest.mark.docker
async def test_the_engine_is_not_asked_for_a_limit_below_what_is_in_use(
    box: DockerBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 of cgroups would kill the agent, and the next job would get the blame."""
    asked: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(box, "_cgroup", None)
        patch.setattr(docker.APIClient, "_post_json", lambda *given, **_: asked.append(given[1]))
        patch.setattr("evalpool.worker.sandbox.docker.memory_bytes", lambda shape: shape.memory_mib << 20)
        assert not await box.limit(replace(SHAPE, memory_mib=4))  # less than the agent has
    assert not asked


@pytest.mark.docker
async def test_memory_that_ran_out_before_a_run_is_not_what_ended_it(lent: DockerBox) -> None:
    begun = time.monotonic()
    assert (await ran(lent, SMALL, python(HOG, limits=WALL))).oom_kills == 1
    await asyncio.sleep(1)
    assert "oom" not in await lent._engine.call(lent._engine.ends, lent.id, time.monotonic())
    assert "oom" in await lent._engine.call(lent._engine.ends, lent.id, begun)


@pytest.mark.docker
async def test_the_stack_and_the_stacks_of_threads_follow_the_memory(box: DockerBox) -> None:
    code = (
        "import resource, threading\nprint(*resource.getrlimit(resource.RLIMIT_STACK))\n"
        "def look():\n"
        "    print(max(int(line.split()[1]) for line in open('/proc/self/smaps') if line.startswith('Size')) << 10)\n"
        "thread = threading.Thread(target=look)\nthread.start()\nthread.join()"
    )
    for shape in (LARGE, SMALL, LARGE):
        most = stack_bytes(shape)
        outcome = await ran(box, shape, python(code))
        soft, hard, largest = map(int, outcome.stdout.split())
        assert soft == hard == most
        assert most <= largest < most + (64 << 20)  # the largest mapping is the thread's stack
        assert (await ran(box, shape, bash("ulimit -Hs"))).stdout == b"%d\n" % (most >> 10)


@pytest.mark.docker
async def test_each_job_has_its_own_memory_peak_whatever_its_limits_are(box: DockerBox) -> None:
    peaks = []
    for shape, mib in ((LARGE, 300), (SMALL, 20), (LARGE, 0)):
        outcome = await ran(box, shape, python(f"x = bytearray({mib} << 20)"))
        assert outcome.oom_kills == 0
        peaks.append(outcome.memory_bytes >> 20)
    assert 4 <= peaks[2] < 20
    assert abs(peaks[0] - peaks[2] - 300) < 8
    assert abs(peaks[1] - peaks[2] - 20) < 8


@pytest.mark.docker
async def test_the_agent_keeps_no_memory_of_a_large_job(box: DockerBox) -> None:
    """It would be part of the memory of the next job, which may be small."""
    echo = "import sys; data = sys.stdin.buffer.read(); sys.stdout.buffer.write(data[:9 << 20])"
    limits, used = WALL.model_copy(update={"output_bytes": 10 << 20}), []
    for mib in (0, 20, 8, 30, 16, 0):
        given = python(echo, stdin=b"x" * (mib << 20), limits=limits)
        assert (await ran(box, replace(LARGE, extra_mib=128), given)).stdout_total == min(mib, 9) << 20
        usage = box.usage()
        assert usage is not None
        used.append(usage.memory_bytes >> 20)
    assert max(used) < used[0] + 4, used
    given = python("print(len(open('data').read()))", stdin=bytes(20 << 20), files={"data": bytes(3 << 20)})
    for last in (False, True):  # with what is kept for another case
        outcome = await ran(box, replace(LARGE, extra_mib=128), replace(given, more=not last))
        assert outcome.stdout == b"3145728\n"
        usage = box.usage()
        assert usage is not None
        assert usage.memory_bytes >> 20 < used[0] + (4 if last else 8)


@pytest.mark.docker
async def test_a_container_without_an_agent_takes_other_limits(
    engine: Engine, engine_client: docker.DockerClient
) -> None:
    box = ExecBox(LARGE, engine)
    await box.start()
    try:
        assert await box.limit(SMALL)
        assert kernel_limits(box)["memory"] == memory_bytes(SMALL)
        assert kernel_limits(box)["processes"] == SMALL.processes + 2
        outcome = await box.run(bash("ulimit -Hs"))
        assert outcome.stdout == b"%d\n" % (stack_bytes(SMALL) >> 10)
    finally:
        await box.close()


@pytest.mark.docker
@pytest.mark.parametrize("made", [DockerBox, ExecBox])
async def test_a_container_whose_limits_cannot_be_set_at_its_start_is_removed(
    engine: Engine, engine_client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch, made: type[Box]
) -> None:
    monkeypatch.setattr(cgroup.Cgroup, "limit", lambda *_: False)
    box = DockerBox(SHAPE, engine, settings=settings()) if made is DockerBox else ExecBox(SHAPE, engine)
    with pytest.raises(SandboxLost, match="limits"):
        await box.start()
    assert not box.alive
    async with asyncio.timeout(PATIENCE):
        while box.id in containers(engine_client):
            await asyncio.sleep(0.05)


class Unified:
    """The files of a container with version 2 of cgroups, as the kernel shows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = {
            "cpu.stat": "usage_usec 1\n", "memory.events": "oom_kill 0\n", "memory.current": "1000\n",
            "memory.peak": "1000\n", "memory.max": "9000\n", "pids.current": "1\n", "pids.max": "8\n",
            "cgroup.events": "frozen 0\n", "memory.reclaim": "",
        }  # fmt: skip
        for name, text in files.items():
            (folder / name).write_text(text)

    def set(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def get(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def unified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Unified:
    monkeypatch.setattr(cgroup, "_paths", lambda *_: {"": tmp_path})
    return Unified(tmp_path)


def test_version_2_is_limited_by_its_own_files(unified: Unified) -> None:
    group = cgroup.Cgroup(os.getpid(), "")
    assert group.limit(5000, 7, 9)
    assert (unified.get("memory.max"), unified.get("pids.max")) == ("5000", "9")
    group.close()


def test_version_2_is_not_limited_below_what_is_in_use_since_the_kernel_would_kill(unified: Unified) -> None:
    group = cgroup.Cgroup(os.getpid(), "")
    unified.set("memory.current", "6000\n")
    assert not group.limit(5000, 7, 9)
    assert unified.get("memory.reclaim") == "1000"
    assert unified.get("memory.max") == "9000\n"
    group.close()
