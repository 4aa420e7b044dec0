"""What only a container does: walls, counters, and a death of its own when its owner dies."""

import asyncio
import subprocess
import sys
import threading
from dataclasses import replace

import docker
import pytest

from schemas import Limits, SandboxLost, SetupError
from schemas.settings import settings
from tests.conftest import ROOT, containers, eventually
from tests.sandbox.conftest import SHAPE
from tests.sandbox.test_contract import bash, python
from worker.sandbox.base import Shape
from worker.sandbox.docker import DockerSandbox
from worker.sandbox.engine import OWNER, Engine, owner
from worker.sandbox.hardening import AGENT_MIB, CAPABILITIES, options

pytestmark = pytest.mark.docker


async def test_the_container_is_as_hard_as_it_should_be(box: DockerSandbox, engine_client: docker.DockerClient) -> None:
    found = engine_client.api.inspect_container(box.id)
    host = found["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["CapDrop"] == ["ALL"]
    assert [name.removeprefix("CAP_") for name in host["CapAdd"]] == CAPABILITIES
    assert host["ReadonlyRootfs"]
    assert "no-new-privileges" in host["SecurityOpt"]
    assert host["Memory"] == host["MemorySwap"] == (SHAPE.memory_mib + AGENT_MIB) << 20
    assert host["PidsLimit"] == SHAPE.processes + 1
    assert host["NanoCpus"] == 10**9
    assert host["IpcMode"] == "private"
    assert host["AutoRemove"]
    assert host["LogConfig"]["Type"] == "none"
    assert not host["Privileged"]
    assert not host["Binds"]
    assert not found["Mounts"]


async def test_the_job_is_nobody(box: DockerSandbox) -> None:
    outcome = await box.run(bash("id -u; grep -E '^(Cap(Eff|Prm|Bnd|Inh|Amb)|NoNewPrivs)' /proc/self/status"))
    uid, *status = outcome.stdout.decode().split("\n")
    assert int(uid) >= 1 << 20
    values = dict(line.split(":\t") for line in status if line)
    assert {values[name] for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {"0" * 16}
    assert values["NoNewPrivs"] == "1"


@pytest.mark.parametrize(
    "code",
    [
        "open('/proc/1/mem', 'wb')",
        "open('/proc/1/environ')",
        "import os; os.listdir('/proc/1/fd')",
        "import os; os.kill(1, 9)",
        "import os; os.setuid(0)",
        "open('/etc/passwd', 'a')",
        "open('/usr/lib/python3.11/os.py', 'a')",
        "import os; os.mkdir('/x')",
        "import socket; socket.create_connection(('1.1.1.1', 53), 2)",
        "import os; os.unlink('/box/main.py')",
    ],
)
async def test_what_a_job_must_not_do_fails(box: DockerSandbox, code: str) -> None:
    outcome = await box.run(python(code))
    assert outcome.said == "raised", outcome
    assert b"Error" in outcome.stderr
    assert await box.reset()


async def test_memory_is_limited_and_told(box: DockerSandbox) -> None:
    outcome = await box.run(python("x = bytearray(10**9)"))
    assert (outcome.exit_code, outcome.signal, outcome.oom_kills) == (None, 9, 1)
    assert await box.reset()
    after = await box.run(python("print(1)"))
    assert (after.oom_kills, after.stdout) == (0, b"1\n")


async def test_peaks_of_memory_are_each_jobs_own(box: DockerSandbox) -> None:
    peaks = []
    for mib in (64, 0, 32):
        outcome = await box.run(python(f"x = bytearray({mib} << 20)"))
        peaks.append(outcome.memory_bytes >> 20)
        assert await box.reset()
    base = peaks[1]
    assert 4 <= base < 32
    assert abs(peaks[0] - base - 64) < 8
    assert abs(peaks[2] - base - 32) < 8


async def test_processes_are_limited(box: DockerSandbox) -> None:
    code = "import os, time\nfor i in range(100):\n    if not os.fork(): time.sleep(9)"
    outcome = await box.run(python(code))
    assert b"BlockingIOError" in outcome.stderr
    assert await box.reset()


async def test_what_outlives_the_program_is_killed(box: DockerSandbox) -> None:
    outcome = await box.run(bash("(setsid sleep 1000 &) ; echo done"))
    assert (outcome.stdout, outcome.exit_code) == (b"done\n", 0)
    assert outcome.wall_seconds < 100
    assert await box.reset()


async def test_cpu_time_of_all_processes_is_counted(box: DockerSandbox) -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    code = f"import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, '-c', '''{burn}'''])"
    outcome = await box.run(python(code))
    assert 0.6 <= outcome.cpu_seconds < 1.2


async def test_a_folder_nobody_may_enter_is_wiped(box: DockerSandbox) -> None:
    code = (
        "import os; os.makedirs('/tmp/a/b/c'); os.chmod('/tmp/a/b', 0); os.chmod('/tmp/a', 0); os.mkfifo('/dev/shm/f')"
    )
    assert (await box.run(python(code))).exit_code == 0
    assert await box.reset()


async def test_a_program_is_as_if_started_by_python3(box: DockerSandbox) -> None:
    code = """
import sys, os, atexit, threading, multiprocessing
def double(n): return 2 * n
if __name__ == "__main__":
    print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), sys.stdin.name, sys.flags.isolated)
    print([name for name in sys.modules if "agent" in name], sys.modules["__main__"].x if "x" in globals() else None)
    with multiprocessing.Pool(2) as pool: print(pool.map(double, [1, 2]))
    with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(double, [3]))
    atexit.register(print, "last")
    threading.Timer(0.05, print, ["timer"]).start()
    class Global:
        def __del__(self): print("deleted")
    g = Global()
    print("no newline", end="")
"""
    outcome = await box.run(python(code))
    assert outcome.stderr == b""
    head, modules, two, three, *rest = outcome.stdout.decode().splitlines()
    assert head == "__main__ /box/main.py ['main.py'] /box /box <stdin> 0"
    assert (modules, two, three) == ("[] None", "[2, 4]", "[6]")
    assert rest == ["no newlinetimer", "last", "deleted"]


async def test_a_traceback_shows_the_program_and_nothing_of_ours(box: DockerSandbox) -> None:
    outcome = await box.run(python("def f():\n    raise ValueError('x')\nf()"))
    assert outcome.stderr.decode().splitlines() == [
        "Traceback (most recent call last):",
        '  File "/box/main.py", line 3, in <module>',
        "    f()",
        '  File "/box/main.py", line 2, in f',
        "    raise ValueError('x')",
        "ValueError: x",
    ]


async def test_the_container_goes_when_it_is_closed(box: DockerSandbox, engine_client: docker.DockerClient) -> None:
    await box.close()
    assert box.id not in containers(engine_client)


def test_the_container_goes_when_its_owner_is_killed(engine_client: docker.DockerClient) -> None:
    code = (
        "import asyncio, sys\n"
        "from worker.sandbox.docker import DockerSandbox\n"
        "from worker.sandbox.engine import Engine\n"
        "from schemas.settings import settings\n"
        "from tests.sandbox.conftest import SHAPE\n"
        "async def main():\n"
        "    box = DockerSandbox(SHAPE, Engine(60), settings=settings())\n"
        "    await box.start()\n"
        "    print(box.id, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    box_id = process.stdout.readline().decode().strip()
    process.stdout.close()
    assert box_id in containers(engine_client, process.pid)
    process.kill()
    process.wait()
    eventually(lambda: box_id not in containers(engine_client), 10)


def test_the_sweeper_takes_what_the_dead_left_and_nothing_else(engine: Engine) -> None:
    api = engine.api
    dead = api.create_container_from_config(options(SHAPE, {OWNER: owner().rpartition(":")[0] + ":1"}))["Id"]
    ours = api.create_container_from_config(options(SHAPE, {OWNER: owner()}))["Id"]
    elsewhere = api.create_container_from_config(options(SHAPE, {OWNER: "other-boot:1:1"}))["Id"]
    try:
        assert engine.sweep() >= 1
        left = {each["Id"] for each in api.containers(all=True)}
        assert dead not in left
        assert {ours, elsewhere} <= left
    finally:
        for each in (ours, elsewhere):
            engine.remove(each)


def test_the_sweeper_leaves_a_container_alone_that_is_being_made(engine: Engine) -> None:
    made = threading.Event()

    def sweep() -> None:
        while not made.is_set():
            engine.sweep()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for _ in range(5):
            container, _, _, stream = engine.launch(options(SHAPE, {OWNER: owner()}, ""))
            with stream:  # its end is the container's
                assert engine.api.inspect_container(container)["State"]["Running"]
            engine.remove(container)
    finally:
        made.set()
        sweeper.join()


async def test_a_container_removed_from_outside_is_lost_and_said_so(box: DockerSandbox, engine: Engine) -> None:
    run = asyncio.create_task(box.run(python("import time; time.sleep(1000)", limits=Limits(wall_seconds=1000))))
    await asyncio.sleep(0.3)
    await engine.call(engine.remove, box.id)
    with pytest.raises(SandboxLost):
        await run
    assert not box.alive


async def test_a_program_that_could_not_be_started_is_our_failure(box: DockerSandbox) -> None:
    with pytest.raises(SandboxLost, match="was not started"):
        await box.run(replace(python("print(1)"), env={"a\0b": "no variable has such a name"}))


async def test_a_program_may_end_like_one_that_could_not_be_started(box: DockerSandbox) -> None:
    outcome = await box.run(python("import os; os._exit(125)"))
    assert outcome.exit_code == 125


async def test_a_missing_image_says_what_to_do(engine: Engine) -> None:
    with pytest.raises(SetupError, match="images build"):
        await DockerSandbox(Shape("evalpool/none:0", 64, 8, 8), engine, settings=settings()).start()
