"""Hostile users and programs: other sandboxes, later users and the host stay safe."""

import asyncio
import gc
import io
import json
import os
import tarfile
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker
import pytest

from evalpool.api.sandbox import (
    ExecutionStatus,
    LocalSandboxManager,
    Sandbox,
    SandboxFactory,
    SandboxLost,
    SandboxStatus,
    SandboxType,
    Tool,
    box,
    register_tool,
)
from evalpool.api.sandbox.box import BoxSandbox
from evalpool.api.sandbox.volumes import _unpack
from evalpool.worker.sandbox import session
from evalpool.worker.sandbox.base import Command, Shape
from evalpool.worker.sandbox.local import LocalBox
from evalpool.worker.tools.notebook import _parsed
from tests.conftest import PATIENCE, ROOT, containers, eventually
from tests.library.conftest import Make

TOOLS = ["python_executor", "shell_executor", "file_operation", "notebook_executor"]


# -- the host's files --------------------------------------------------------------------------------------------------


async def test_copying_back_follows_no_link_of_the_host(engine_client: docker.DockerClient, tmp_path: Path) -> None:
    outside, shared = tmp_path / "outside", tmp_path / "shared"
    outside.mkdir()
    shared.mkdir()
    (outside / "python3").write_text("real")
    (shared / "py").symlink_to(outside / "python3")
    (shared / "venv").symlink_to(outside)
    config = {"volumes": {str(shared): {"bind": "/sandbox/shared", "mode": "rw"}}}
    sandbox = SandboxFactory.create_sandbox(SandboxType.DOCKER, config)
    await sandbox.start()
    await sandbox.execute_command("cd shared; rm py; echo mine > py; chmod +x py; echo kept > kept")
    await sandbox.stop()
    assert (outside / "python3").read_text() == "real"
    assert (shared / "py").read_text() == "mine\n"
    assert not (shared / "py").is_symlink()
    assert os.access(shared / "py", os.X_OK)
    again = SandboxFactory.create_sandbox(SandboxType.DOCKER, config)
    await again.start()
    await again.execute_command("cd shared; rm venv; mkdir venv; echo bad > venv/new")
    with pytest.raises(SandboxLost, match="volumes were not copied back"):
        await again.stop()
    assert again.status is SandboxStatus.ERROR
    assert not (outside / "new").exists()
    eventually(lambda: not containers(engine_client, os.getpid()))


def archive(*entries: tuple[str, bytes, dict[str, Any]], mode: str = "w") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as made:  # type: ignore[call-overload]
        for name, content, more in entries:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            for key, value in more.items():
                setattr(entry, key, value)
            made.addfile(entry, io.BytesIO(content))
    return data.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        archive(("../escape", b"x", {})),
        archive(("/tmp/escape", b"x", {})),
        archive(("a/../../escape", b"x", {})),
        archive(("link", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})),
        archive(("hard", b"", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"})),
        archive(("device", b"", {"type": tarfile.CHRTYPE})),
        archive(("comment", b"x", {"pax_headers": {"comment": "1" * 200_000}})),
        archive(("sparse", b"x", {"pax_headers": {"GNU.sparse.map": "0,1", "GNU.sparse.size": "1"}})),
        archive(("large", bytes(2 << 20), {})),
        archive(("bomb", bytes(1 << 20), {}), mode="w:gz"),
        b"garbage" * 1000,
    ],
)  # fmt: skip
def test_a_hostile_archive_writes_nothing(tmp_path: Path, data: bytes) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises((ValueError, OSError, tarfile.TarError)):
        _unpack(data, target, 1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert list(target.iterdir()) == []


async def test_modules_in_the_working_folder_do_not_affect_tools(make: Make) -> None:
    sandbox = await make()
    for name in ("shutil", "tarfile", "stat", "os", "json", "base64", "posix"):
        await sandbox.execute_command(f"echo 'import sys; sys.exit(0)' > {name}.py")
    written = await sandbox.execute_tool("file_operation", {"operation": "write", "file_path": "x", "content": "true"})
    assert written.success
    assert (await sandbox.execute_command("cat x")).stdout == "true"
    await sandbox.put_file("/sandbox/y", "also")
    assert await sandbox.get_file("y") == b"also"
    cell = await sandbox.execute_tool("notebook_executor", {"code": "import json, base64\n1 + 1"})
    assert "SystemExit" in str(cell.error) or cell.success  # they are the cell's own, if it asks for them
    assert (await sandbox.execute_tool("notebook_executor", {"code": "1 + 1"})).output == "\nResult: 2"


async def test_modules_in_the_home_folder_do_not_affect_tools(make: Make) -> None:
    sandbox = await make(env_vars={"PYTHONUNBUFFERED": "1"})  # for which no warm interpreter will do
    site = (await sandbox.execute_command(["python3", "-m", "site", "--user-site"])).stdout.strip()
    await sandbox.execute_command(
        f"mkdir -p {site}; echo 'print(\"forged\"); import os; os._exit(0)' > {site}/usercustomize.py"
    )
    await sandbox.execute_command("echo true > x")
    read = await sandbox.execute_tool("file_operation", {"operation": "read", "file_path": "x"})
    assert read.output == "true\n"


async def test_only_regular_files_are_read(make: Make) -> None:
    sandbox = await make()
    await sandbox.execute_command("ln -s /dev/zero zero; ln -s /etc/passwd passwd; mkfifo fifo; mkdir folder")
    for name in ("zero", "passwd", "fifo", "folder"):
        with pytest.raises(OSError, match=name):
            await asyncio.wait_for(sandbox.get_file(name), 30)


async def test_a_slow_encoding_is_refused(make: Make) -> None:
    sandbox = await make()
    for encoding in ("punycode", "idna", "unicode_escape", "rot13", "no-such"):
        given = {"operation": "write", "file_path": "x", "content": "ü" * 20_000, "encoding": encoding}
        refused = await sandbox.execute_tool("file_operation", given)
        assert str(refused.error).startswith("encoding: ")
    for encoding in ("UTF8", "latin-1", "cp1252", "utf-16", "ascii", "shift_jis"):
        given = {"operation": "write", "file_path": "x", "content": "text", "encoding": encoding}
        assert (await sandbox.execute_tool("file_operation", given)).success
        there = await sandbox.execute_tool("file_operation", given | {"operation": "exists"})
        assert there.output == "exists"


async def test_a_write_that_fails_changes_nothing(engine_client: docker.DockerClient) -> None:
    config = {"tools_config": TOOLS, "resource_limits": {"disk_mib": 8}}
    async with SandboxFactory.create_sandbox(SandboxType.DOCKER, config) as sandbox:
        await sandbox.put_file("kept", "old")
        given = {"operation": "write", "file_path": "kept", "content": "x" * (9 << 20)}
        assert not (await sandbox.execute_tool("file_operation", given)).success
        assert (await sandbox.execute_command("cat kept; ls -A")).stdout == "oldkept\n"
        assert (await sandbox.execute_tool("file_operation", given | {"content": "new"})).success
        with pytest.raises(OSError, match="kept: No space left on device"):
            await sandbox.put_file("kept", "x" * (9 << 20))
        await sandbox.execute_command("ln -s kept link; mkdir -p /tmp/sub")
        with pytest.raises(OSError, match="link: a link is in the way"):
            await sandbox.put_file("link", "x")
        await sandbox.put_file("/tmp/sub/deep/file", "deep")
        assert (await sandbox.execute_command("cat kept /tmp/sub/deep/file; ls -A")).stdout == "newdeepkept\nlink\n"


# -- the agent, and other commands -------------------------------------------------------------------------------------


async def test_commands_fail_in_a_full_sandbox_and_the_sandbox_stays(engine_client: docker.DockerClient) -> None:
    config = {"tools_config": TOOLS, "resource_limits": {"processes": 32}, "memory_limit": "128m"}
    async with SandboxFactory.create_sandbox(SandboxType.DOCKER, config) as sandbox:
        await sandbox.execute_command("true")
        bomb = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.1)\n"
        full = asyncio.create_task(sandbox.execute_python(bomb, 8))
        await asyncio.sleep(1)
        others = await asyncio.gather(*(sandbox.execute_command(["echo", "on"]) for _ in range(12)))
        assert all(other.stdout == "on\n" or other.stderr for other in others)
        await full
        assert (await sandbox.execute_command("echo on")).stdout == "on\n"
        sleeper = asyncio.create_task(sandbox.execute_command("sleep 3; echo woke"))
        await sandbox.execute_command("for x in $(seq 3000); do : > /tmp/$x || break; done")
        unwritten = await sandbox.execute_python("print(1)")
        assert (unwritten.exit_code, "No space left" in unwritten.stderr) == (125, True)
        assert (await sleeper).stdout == "woke\n"
        await sandbox.execute_command("rm -f /tmp/*")
        await sandbox.execute_command(
            "dd if=/dev/zero of=/box/x bs=1M; dd if=/dev/zero of=/sandbox/x bs=1M; rm -f /box/x x"
        )
        unread = await sandbox.execute_command("sleep 0.5", stdin=bytes(150 << 20))
        assert unread.exit_code == 0
        assert (await sandbox.execute_command("echo on")).stdout == "on\n"


async def test_a_reset_and_waiting_commands_never_block_each_other(make: Make) -> None:
    sandbox = await make()
    waiting = [asyncio.create_task(sandbox.execute_command(f"sleep 1000; echo {n}", timeout=2000)) for n in range(24)]
    await asyncio.sleep(1)
    assert await sandbox.reset()
    for task in waiting:
        task.cancel()
    ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    assert len(ends) == 24
    assert (await sandbox.execute_command("ls -A; echo on")).stdout == "on\n"


async def test_output_on_the_harness_channel_is_not_kept(make: Make) -> None:
    sandbox = await make()
    said = await sandbox.execute_python(
        "import os\nfor _ in range(20_000):\n    os.write(3, b'x' * 32)\nprint('on')", 60
    )
    assert "on" in said.stdout or said.stderr
    assert (await sandbox.execute_command("echo on")).stdout == "on\n"


async def test_a_sandbox_without_a_verified_reset_is_not_used_again(
    engine_client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for broken_off in (True, False):
        async with SandboxFactory.create_sandbox(SandboxType.DOCKER) as sandbox:
            assert isinstance(sandbox, BoxSandbox)
            waiting = asyncio.create_task(sandbox.execute_command("sleep 100"))
            await asyncio.sleep(0.2)
            if broken_off:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(sandbox.reset(), 0.0005)
            else:
                monkeypatch.setattr(session, "CLOSE_SECONDS", 0.0)
                assert not await sandbox.reset()
            await asyncio.wait((waiting,))
            with pytest.raises(SandboxLost):
                await sandbox.execute_command("echo on")
            assert sandbox.get_info().status is SandboxStatus.ERROR
            assert "reset" in sandbox.metadata["error"] or "died" in sandbox.metadata["error"]
            if not waiting.cancelled():
                waiting.exception()


async def test_the_shell_is_looked_up_again_after_a_reset(make: Make) -> None:
    sandbox = await make()
    sandbox._shell_path = "/bin/true"
    assert await sandbox.reset()
    assert (await sandbox.execute_command("exit 3")).exit_code == 3


async def test_stopping_a_sandbox_returns_the_output_so_far(make: Make) -> None:
    sandbox = await make()
    begun: list[str] = []

    def heed(*line: str) -> None:
        begun.append(line[-1])

    await sandbox.execute_tool("notebook_executor", {"code": "1"})  # starts its interpreter
    command = sandbox.execute_command
    calls = [asyncio.create_task(command("echo begun; sleep 1000", 2000, heed)) for _ in range(40)]
    cell = asyncio.create_task(sandbox.execute_tool("notebook_executor", {"code": "import time\ntime.sleep(1000)"}))
    async with asyncio.timeout(PATIENCE):
        while len(begun) < 16:  # so many run at a time
            await asyncio.sleep(0.05)
    await sandbox.stop()
    ended = await asyncio.gather(*calls)
    assert {each.status for each in ended} == {ExecutionStatus.CANCELLED}
    assert sum(each.stdout == "begun\n" for each in ended) == 16
    assert sum(each.stderr == "The command was stopped before it began." for each in ended) == 24
    assert (await cell).status is ExecutionStatus.CANCELLED


@pytest.mark.parametrize("begun", [0, 16])
async def test_commands_of_a_sandbox_that_does_not_wait_for_their_end_are_cancelled_too(
    make: Make, monkeypatch: pytest.MonkeyPatch, begun: int
) -> None:
    monkeypatch.setattr(box, "STOP_SECONDS", 0.001)
    sandbox = await make()
    lines: list[str] = []

    def heed(*line: str) -> None:
        lines.append(line[-1])

    calls = [asyncio.create_task(sandbox.execute_command("echo begun; sleep 1000", 2000, heed)) for _ in range(40)]
    async with asyncio.timeout(PATIENCE):
        while len(lines) < begun:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)  # every call is under way
    await sandbox.stop()
    ended = await asyncio.gather(*calls)
    assert {each.status for each in ended} == {ExecutionStatus.CANCELLED}
    assert sum(each.stdout == "begun\n" for each in ended) == begun
    with pytest.raises(SandboxLost):
        await sandbox.execute_command("echo on")


async def test_an_interrupt_before_the_start_has_no_effect(bubblewrap: None) -> None:
    for walls in (True, False):
        box = LocalBox(Shape("", 256, 32, 32), walls=walls)
        await box.start()
        running = box.spawn(Command(argv=("sleep", "0.2"), wall_seconds=60), lambda *_: None)
        running.interrupt()  # which would be every process of the machine, or this one
        assert box.usage().processes == 0
        assert (await running.over).exit_code == 0
        await box.close()


async def test_a_deep_tree_is_removed_without_delaying_others(make: Make) -> None:
    sandbox = await make()
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n"
    await sandbox.execute_python(deep, 60)
    clean = await sandbox.reset()
    await sandbox.stop()
    assert isinstance(clean, bool)
    other = await make()
    assert (await other.execute_command("ls -A")).stdout == ""


async def test_no_command_reaches_the_line_of_the_agent_or_of_a_keeper(engine_client: docker.DockerClient) -> None:
    hostile = ROOT / "tests" / "hostile"
    case = tomllib.loads((hostile / "cases" / "141_direct_line_by_other_ways.toml").read_text())
    config = {"tools_config": ["python_executor"]}
    async with SandboxFactory.create_sandbox(SandboxType.DOCKER, config) as sandbox:
        await sandbox.put_file("probe.py", (hostile / "probe.py").read_text())
        other = asyncio.create_task(sandbox.execute_command("echo here > here; sleep 1000"))
        while (await sandbox.execute_command("cat here")).exit_code != 0:
            pass
        result = await sandbox.execute_tool("python_executor", {"code": case["code"]})
        assert result.output.startswith("guarded 3 True\n"), result  # the agent and two keepers
        assert result.output.endswith("bad: none\n"), result.output[-2000:]
    with suppress(SandboxLost):
        await other


# -- notebooks ---------------------------------------------------------------------------------------------------------


async def test_a_notebook_cannot_fill_or_stop_its_host(notebook_image: None) -> None:
    config = {"tools_config": TOOLS}
    async with SandboxFactory.create_sandbox(SandboxType.DOCKER, config) as sandbox:

        async def cell(code: str, **more: object) -> Any:
            return await sandbox.execute_tool("notebook_executor", {"code": code, **more})

        writing = "import os\nfor fd in range(200, 260):\n    try: os.write(fd, {})\n    except OSError: pass\n"
        deep = await cell(writing.format("b'[' * 300_000 + b'\\n'"))
        assert deep.status in ExecutionStatus
        assert (await cell("1 + 1")).output == "\nResult: 2"
        flood = "import threading\n" + writing.format("b'{}\\n' * 10_000").replace(
            "for fd", "while True:\n  for fd"
        ).replace("\n    ", "\n      ")
        await cell(f"import threading\nthreading.Thread(target=exec, args=({flood!r},)).start()")
        await asyncio.sleep(2)
        began = time.monotonic()
        late = await cell("2 + 2", timeout=5)
        assert time.monotonic() - began < 60
        assert late.status in ExecutionStatus
        shown = await cell("for x in range(5000): display(x)", timeout=60)
        assert len(shown.metadata["displays"]) <= 1000
        assert sandbox.status is SandboxStatus.RUNNING
        assert (await sandbox.execute_command("echo on")).stdout == "on\n"


async def test_messages_that_would_take_too_much_memory_are_dropped(notebook_image: None) -> None:
    assert _parsed(b"[" + b"[]," * 100_000 + b"[]]") is None
    assert _parsed(json.dumps({"id": 1, "display": {"image/png": "x" * 1_000_000}}).encode())["id"] == 1
    config = {"tools_config": TOOLS}
    async with SandboxFactory.create_sandbox(SandboxType.DOCKER, config) as sandbox:
        odd = """
import json, os
bad = {"text/plain": "\\ud800", "deep": [[1]], "n": 5}
for number in range(5):
    line = json.dumps({"id": number, "display": bad, "done": True, "result": bad, "error": bad}).encode() + b"\\n"
    for fd in range(200, 260):
        try: os.write(fd, line)
        except OSError: pass
"""
        result = await sandbox.execute_tool("notebook_executor", {"code": odd})
        assert json.loads(result.model_dump_json())["metadata"]["displays"]
        assert all(isinstance(words, str) for words in (result.metadata["result"] or {}).values())


async def test_a_sandbox_is_replaced_after_its_kernel_crashed(notebook_image: None) -> None:
    async with LocalSandboxManager() as manager:
        await manager.initialize_pool(1, SandboxType.DOCKER, {"tools_config": TOOLS})
        killed = "import os\nos.kill(os.getpid(), 9)"
        await manager.execute_tool_in_pool("notebook_executor", {"code": killed})
        await manager.execute_tool_in_pool("notebook_executor", {"code": "1"})
        assert (await manager.get_stats())["pool"]["created"] == 2


# -- misuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e18, "5", True])
async def test_an_invalid_timeout_is_refused(make: Make, timeout: Any) -> None:
    sandbox = await make()
    with pytest.raises(ValueError, match="timeout"):
        await sandbox.execute_command("true", timeout=timeout)
    assert (await sandbox.execute_command("echo on")).stdout == "on\n"


@pytest.mark.parametrize("command", ["", [], [1], b"ls", "a\0b", ["echo", "\ud800"], None])
async def test_an_invalid_command_is_refused(make: Make, command: Any) -> None:
    sandbox = await make()
    with pytest.raises(ValueError, match="command"):
        await sandbox.execute_command(command)
    for stdin in (5, None, [1], "\ud800"):
        with pytest.raises((TypeError, ValueError)):
            await sandbox.execute_command("true", stdin=stdin)  # type: ignore[arg-type]
    code = await sandbox.execute_tool("python_executor", {"code": "print('\ud800')"})
    assert code.status is ExecutionStatus.ERROR
    assert (await sandbox.execute_command("echo on")).stdout == "on\n"


async def test_two_starts_at_once_start_one_sandbox(engine_client: docker.DockerClient) -> None:
    sandbox = SandboxFactory.create_sandbox(SandboxType.DOCKER)
    await asyncio.gather(sandbox.start(), sandbox.start(), sandbox.start())
    assert len(containers(engine_client, os.getpid())) == 1
    await asyncio.gather(sandbox.stop(), sandbox.stop())
    eventually(lambda: not containers(engine_client, os.getpid()))


def test_a_call_from_another_event_loop_is_refused(engine_client: docker.DockerClient) -> None:
    async def use(sandbox: Sandbox) -> None:
        with pytest.raises((RuntimeError, SandboxLost)):
            await asyncio.wait_for(sandbox.execute_command("true"), 30)
        await sandbox.stop()

    def both() -> None:
        sandbox = SandboxFactory.create_sandbox(SandboxType.DOCKER)
        asyncio.run(sandbox.start())
        asyncio.run(use(sandbox))

    both()
    eventually(lambda: not containers(engine_client, os.getpid()))
    gc.collect()  # what is still open would complain now


async def test_a_pool_resets_tools_and_replaces_broken_sandboxes(engine_client: docker.DockerClient) -> None:
    @register_tool("counter")
    class Counter(Tool):
        """Count the calls."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.calls = 0

        async def execute(self, sandbox: Sandbox) -> str:
            self.calls += 1
            return str(self.calls)

    async with LocalSandboxManager() as manager:
        config = {"tools_config": ["counter", "shell_executor"]}
        first, second = await asyncio.gather(
            *(manager.initialize_pool(1, SandboxType.DOCKER, config) for _ in range(2))
        )
        assert first == second
        assert [(await manager.execute_tool_in_pool("counter")).output for _ in range(3)] == ["1", "1", "1"]
        before = (await manager.get_stats())["pool"]["created"]
        await manager.execute_tool_in_pool("shell_executor", {"command": "sleep 100", "timeout": 0.2})
        await manager.execute_tool_in_pool("counter")
        assert (await manager.get_stats())["pool"]["created"] == before + 1
    with pytest.raises(ValueError, match="pool_size"):
        await LocalSandboxManager().initialize_pool("2", SandboxType.DUMMY)  # type: ignore[arg-type]
    eventually(lambda: not containers(engine_client, os.getpid()))
