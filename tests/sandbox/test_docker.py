"""Properties of containers alone: isolation, counters, and removal when the owner dies."""

import ast
import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from evalpool.schemas import Limits, SandboxLost, SetupError
from evalpool.schemas.settings import settings
from evalpool.worker.sandbox.agent.main import Agent
from evalpool.worker.sandbox.agent.wire import UNABLE
from evalpool.worker.sandbox.base import Command, Shape
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.sandbox.engine import OWNER, Engine, owner
from evalpool.worker.sandbox.hardening import AGENT_MIB, CAPABILITIES, options
from evalpool.worker.sandbox.line import Line, opened
from evalpool.worker.sandbox.stream import Stream
from tests.conftest import PATIENCE, ROOT, containers, eventually
from tests.sandbox.conftest import SHAPE
from tests.sandbox.test_contract import bash, python

pytestmark = pytest.mark.docker


async def test_the_container_is_hardened(box: DockerBox, engine_client: docker.DockerClient) -> None:
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


async def test_a_job_has_no_privileges(box: DockerBox) -> None:
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
async def test_forbidden_actions_of_a_job_fail(box: DockerBox, code: str) -> None:
    outcome = await box.run(python(code))
    assert outcome.note == "raised", outcome
    assert b"Error" in outcome.stderr
    if "socket" not in code:  # packets that it sent have been counted, so the sandbox is not as at birth
        assert await box.reset()


async def test_memory_is_limited_and_reported(box: DockerBox) -> None:
    outcome = await box.run(python("x = bytearray(10**9)"))
    assert (outcome.exit_code, outcome.signal, outcome.oom_kills) == (None, 9, 1)
    assert await box.reset()
    after = await box.run(python("print(1)"))
    assert (after.oom_kills, after.stdout) == (0, b"1\n")


async def test_an_agent_that_gets_stuck_for_memory_late_is_not_waited_for(
    box: DockerBox, engine_client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpool.worker.sandbox.docker.GRACE_SECONDS", PATIENCE)
    looks = iter([False, False])
    monkeypatch.setattr(box, "_out_of_memory", lambda _: next(looks, True))
    agent = engine_client.api.inspect_container(box.id)["State"]["Pid"]
    os.kill(agent, signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE / 2):
        outcome = await box.run(python("", limits=Limits(wall_seconds=0.5)))
    assert outcome.signal == signal.SIGKILL
    assert not await box.reset()


async def test_each_job_has_its_own_memory_peak(box: DockerBox) -> None:
    peaks = []
    for mib in (64, 0, 32):
        outcome = await box.run(python(f"x = bytearray({mib} << 20)"))
        peaks.append(outcome.memory_bytes >> 20)
        assert await box.reset()
    base = peaks[1]
    assert 4 <= base < 32
    assert abs(peaks[0] - base - 64) < 8
    assert abs(peaks[2] - base - 32) < 8


async def test_processes_are_limited(box: DockerBox) -> None:
    code = "import os, time\nfor i in range(100):\n    if not os.fork(): time.sleep(9)"
    outcome = await box.run(python(code))
    assert b"BlockingIOError" in outcome.stderr
    assert await box.reset()


async def test_processes_that_outlive_the_program_are_killed(box: DockerBox) -> None:
    outcome = await box.run(bash("(setsid sleep 1000 &) ; echo done"))
    assert (outcome.stdout, outcome.exit_code) == (b"done\n", 0)
    assert outcome.wall_seconds < 100
    assert await box.reset()


async def test_cpu_time_of_all_processes_is_counted(box: DockerBox) -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    code = f"import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, '-c', '''{burn}'''])"
    outcome = await box.run(python(code))
    assert 0.6 <= outcome.cpu_seconds < 1.2


async def test_a_folder_without_permissions_is_wiped(box: DockerBox) -> None:
    code = (
        "import os; os.makedirs('/tmp/a/b/c'); os.chmod('/tmp/a/b', 0); os.chmod('/tmp/a', 0); os.mkfifo('/dev/shm/f')"
    )
    assert (await box.run(python(code))).exit_code == 0
    assert await box.reset()


async def test_a_program_sees_the_same_as_if_python3_had_started_it(box: DockerBox) -> None:
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


async def test_a_traceback_shows_the_program_and_nothing_of_ours(box: DockerBox) -> None:
    outcome = await box.run(python("def f():\n    raise ValueError('x')\nf()"))
    assert outcome.stderr.decode().splitlines() == [
        "Traceback (most recent call last):",
        '  File "/box/main.py", line 3, in <module>',
        "    f()",
        '  File "/box/main.py", line 2, in f',
        "    raise ValueError('x')",
        "ValueError: x",
    ]


async def test_closing_the_sandbox_removes_the_container(box: DockerBox, engine_client: docker.DockerClient) -> None:
    await box.close()
    async with asyncio.timeout(PATIENCE):  # the engine may still be at it, as the agent's end removes it, too
        while box.id in containers(engine_client):
            await asyncio.sleep(0.05)


async def test_an_agent_on_this_machine_is_reached_directly(box: DockerBox) -> None:
    assert box._stream.direct


async def test_a_line_to_another_process_than_the_agent_is_not_opened() -> None:
    ends = os.pipe()
    try:
        names = [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in ends]
        line = opened(os.getpid(), [(ends[1], names[1]), (ends[0], names[0])])
        assert line is not None
        for fd in line:
            os.close(fd)
        assert opened(os.getpid(), [(ends[1], "pipe:[1]"), (ends[0], names[0])]) is None
        assert opened(os.getpid(), [(ends[1], names[1]), (ends[0], "")]) is None
        assert opened(os.getppid(), [(ends[1], names[1]), (ends[0], names[0])]) is None
        assert opened(os.getpid(), []) is None
        for impossible in ("../1", float("inf"), None):
            with pytest.raises(SandboxLost):
                opened(os.getpid(), [(impossible, names[1]), (ends[0], names[0])])
    finally:
        for fd in ends:
            os.close(fd)


@pytest.mark.parametrize("kind", ["file", "named pipe", "device", "socket", "folder"])
def test_nothing_is_opened_for_an_agent_that_offers_something_else_than_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Opening a device can do anything, and a named pipe can be anybody's."""
    path = tmp_path / "pipe:[1]"
    if kind == "file":
        path.touch()
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with socket.socket() as server:
        flags = os.O_RDONLY if kind == "folder" else os.O_RDWR
        fd = server.fileno() if kind == "socket" else os.open("/dev/null" if kind == "device" else path, flags)
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        real, seen = os.open, list[int]()

        def look(place: str, flags: int) -> int:
            seen.append(flags)
            return real(place, flags)

        monkeypatch.setattr(os, "open", look)
        for offered in (name, "pipe:[1]", 1):
            assert opened(os.getpid(), [(fd, offered), (fd, offered)]) is None
        assert all(each & os.O_PATH for each in seen)
        if kind != "socket":
            os.close(fd)


async def test_a_line_that_cannot_be_used_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise OSError("no memory")

    for name in ("connect_read_pipe", "connect_write_pipe"):
        ends = [*os.pipe(), *os.pipe()]
        stream = Stream()
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), name, fail)
            with pytest.raises(OSError, match="no memory"):
                await stream.go_over(Line(ends[0], ends[3]))
        stream.close()
        await asyncio.sleep(0)
        for fd in (ends[0], ends[3]):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        for fd in ends[1:3]:
            os.close(fd)


async def test_a_direct_line_leads_to_the_agent_alone(box: DockerBox) -> None:
    """No program has a descriptor of the line, and none can open those of the agent."""
    code = """
import os
def name(place):
    try: return os.readlink(place)
    except OSError as error: return type(error).__name__
print({place: name(place) for pid in (1, os.getpid()) for fd in range(64) if (place := f"/proc/{pid}/fd/{fd}")})
"""
    outcome = await box.run(python(code))
    seen = ast.literal_eval(outcome.stdout.decode())
    assert {seen[f"/proc/1/fd/{fd}"] for fd in range(64)} == {"PermissionError"}
    assert sum(not name.endswith("Error") for name in seen.values()) == 5  # its streams and the harness's two pipes
    assert await box.reset()


async def test_the_last_words_of_an_agent_with_a_direct_line_are_told(box: DockerBox) -> None:
    box._stream.send(b"\0\0\0\3\0\0\0\0[1]")  # a request that no worker sends
    with pytest.raises(SandboxLost) as raised:
        await box.run(python(""))
    assert "AttributeError" in str(raised.value.__cause__)


@pytest.mark.parametrize("writer", ["agent", "keeper"])
async def test_an_agent_that_can_tell_its_worker_nothing_more_exits_as_at_the_end_of_its_stream(
    box: DockerBox, engine_client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    monkeypatch.setattr(box._stream, "hung_up", lambda _: None)
    ended = asyncio.create_task(asyncio.to_thread(engine_client.api.wait, box.id))
    replies = box._stream._transports[1]
    assert isinstance(replies, asyncio.ReadTransport)
    replies.close()

    def processes() -> int:
        usage = box.usage()
        return usage.processes if usage else 0

    async with asyncio.timeout(PATIENCE):
        if writer == "agent":
            run = asyncio.create_task(box.run(python("print(1)")))
            await asyncio.wait((ended, run), return_when=asyncio.FIRST_COMPLETED)
            run.cancel()
        else:
            box.spawn(Command(argv=("sh", "-c", "sleep 0.3; echo 1")), lambda *_: None)
            for stage in (lambda: processes() == 1, lambda: processes() > 1):
                while stage() and not ended.done():
                    await asyncio.sleep(0.01)
            box._stream.close()
        assert (await ended)["StatusCode"] == 0, box._stream.kept[2].decode()


@pytest.mark.parametrize("way", ["direct", "attached"])
def test_the_container_is_removed_when_its_owner_is_killed(engine_client: docker.DockerClient, way: str) -> None:
    code = (
        "import asyncio, sys\n"
        "from worker.sandbox import docker\n"
        "from worker.sandbox.docker import DockerBox\n"
        f"if {way!r} == 'attached': docker.opened = lambda *_: None\n"
        "from worker.sandbox.engine import Engine\n"
        "from schemas.settings import settings\n"
        "from tests.sandbox.conftest import SHAPE\n"
        "async def main():\n"
        "    box = DockerBox(SHAPE, Engine(60), settings=settings())\n"
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
    eventually(lambda: box_id not in containers(engine_client))


def test_the_sweeper_removes_only_containers_of_dead_owners(engine: Engine, engine_client: docker.DockerClient) -> None:
    api = engine.api
    dead = api.create_container_from_config(options(SHAPE, {OWNER: owner().rpartition(":")[0] + ":1"}))["Id"]
    ours = api.create_container_from_config(options(SHAPE, {OWNER: owner()}))["Id"]
    elsewhere = api.create_container_from_config(options(SHAPE, {OWNER: "other-boot:1:1"}))["Id"]
    try:
        engine.sweep()
        eventually(
            lambda: dead not in containers(engine_client)
        )  # a worker beside this test may have begun to remove it
        assert {ours, elsewhere} <= set(containers(engine_client))
    finally:
        for each in (ours, elsewhere):
            engine.remove(each)


def test_the_sweeper_does_not_touch_a_container_that_is_being_created(engine: Engine) -> None:
    made = threading.Event()

    def sweep() -> None:
        while not made.is_set():
            engine.sweep()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for _ in range(5):
            container, _, _, stream = engine.launch(options(SHAPE, {OWNER: owner()}, ""))
            with stream:  # when it ends, the container does
                assert engine.api.inspect_container(container)["State"]["Running"]
            engine.remove(container)
    finally:
        made.set()
        sweeper.join()


async def test_a_container_removed_from_outside_raises_sandbox_lost(box: DockerBox, engine: Engine) -> None:
    run = asyncio.create_task(box.run(python("import time; time.sleep(1000)", limits=Limits(wall_seconds=1000))))
    await asyncio.sleep(0.3)
    await engine.call(engine.remove, box.id)
    with pytest.raises(SandboxLost):
        await run
    assert not box.alive


async def test_a_program_that_could_not_be_started_raises_sandbox_lost(box: DockerBox) -> None:
    with pytest.raises(SandboxLost, match="was not started"):
        await box.run(replace(python("print(1)"), env={"a\0b": "no variable has such a name"}))


async def test_a_program_may_exit_with_the_code_of_one_that_was_not_started(box: DockerBox) -> None:
    outcome = await box.run(python("import os; os._exit(125)"))
    assert outcome.exit_code == 125


async def test_a_missing_image_says_what_to_do(engine: Engine) -> None:
    with pytest.raises(SetupError, match="images build"):
        await DockerBox(Shape("evalpool/none:0", 64, 8, 8), engine, settings=settings()).start()


def test_the_root_cause_of_a_failed_import_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of numpy itself is a page of advice, which ends with the version of Python."""
    (tmp_path / "like_numpy.py").write_text(
        "try:\n    raise ImportError('libblas.so.3: cannot open\\n shared object file')\n"
        "except ImportError as error:\n    raise ImportError('\\n\\nPLEASE READ THIS\\n' * 200) from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as raised:
        Agent.warm(object(), ["like_numpy"])  # type: ignore[arg-type]
    assert raised.value.code == f"{UNABLE}like_numpy (ImportError: libblas.so.3: cannot open shared object file)"
