"""What every type of sandbox must do."""

import asyncio
import io
import tarfile
from pathlib import Path

import pytest

from evalpool.api.sandbox import ExecutionStatus, SandboxStatus, ToolResult
from evalpool.api.sandbox.box import BoxSandbox
from evalpool.schemas.errors import SandboxLost
from tests.library.conftest import Make


async def do(sandbox: BoxSandbox, tool: str, **parameters: object) -> ToolResult:
    return await sandbox.execute_tool(tool, parameters)


async def test_a_sandbox_runs_from_start_to_stop(make: Make) -> None:
    sandbox = await make()
    assert sandbox.status is SandboxStatus.RUNNING
    info = sandbox.get_info()
    assert (info.id, info.status, len(info.id)) == (sandbox.id, SandboxStatus.RUNNING, 8)
    assert set(info.available_tools) == set(sandbox.list_tools())
    await sandbox.start()  # which it is already
    await sandbox.stop()
    assert sandbox.status is SandboxStatus.STOPPED
    await sandbox.stop()
    await sandbox.cleanup()
    with pytest.raises(ValueError, match="is not active"):
        await do(sandbox, "python_executor", code="1")
    with pytest.raises(SandboxLost):
        await sandbox.execute_command("true")


async def test_a_stopped_sandbox_can_be_started_again(make: Make) -> None:
    sandbox = await make()
    await sandbox.execute_command("echo 1 > file")
    await sandbox.stop()
    await sandbox.start()
    assert (await sandbox.execute_command("ls -A")).stdout == ""


async def test_a_command_is_a_line_or_a_list(sandbox: BoxSandbox) -> None:
    line = await sandbox.execute_command("echo $((1 + 2)); echo no >&2; exit 3")
    assert (line.exit_code, line.stdout, line.stderr, line.status) == (3, "3\n", "no\n", ExecutionStatus.ERROR)
    words = await sandbox.execute_command(["printf", "%s|", "a b", "$HOME"], stdin="unread")
    assert (words.stdout, words.status, words.command) == (
        "a b|$HOME|",
        ExecutionStatus.SUCCESS,
        ["printf", "%s|", "a b", "$HOME"],
    )
    assert (await sandbox.execute_command(["cat"], stdin="given ü")).stdout == "given ü"


async def test_a_command_that_takes_too_long_ends_with_all_it_started(sandbox: BoxSandbox) -> None:
    slow = await sandbox.execute_command("echo early; sleep 4321 & sleep 4321", timeout=0.6)
    assert (slow.status, slow.stdout, slow.exit_code) == (ExecutionStatus.TIMEOUT, "early\n", 124)
    assert (await sandbox.execute_command("ps -eo args | grep -c '[s]leep 4321'")).stdout == "0\n"
    itself = await sandbox.execute_command("exit 124")
    assert itself.status is ExecutionStatus.ERROR


async def test_commands_may_be_called_concurrently(sandbox: BoxSandbox) -> None:
    meet = [f"touch {number}; until [ $(ls | wc -l) = 6 ]; do sleep 0.01; done; echo {number}" for number in range(6)]
    results = await asyncio.gather(*(sandbox.execute_command(line) for line in meet))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(6)]
    many = await asyncio.gather(*(sandbox.execute_command(f"echo {number}") for number in range(40)))
    assert [result.stdout for result in many] == [f"{number}\n" for number in range(40)]


async def test_lines_come_while_a_command_runs(sandbox: BoxSandbox) -> None:
    told: list[tuple[str, str]] = []
    go = asyncio.Event()

    def heed(name: str, line: str) -> None:
        told.append((name, line))
        go.set()

    waiting = asyncio.create_task(
        sandbox.execute_command("echo one; until [ -e go ]; do sleep 0.01; done; printf two >&2", stream=heed)
    )
    await asyncio.wait_for(go.wait(), 30)
    assert told == [("stdout", "one")]
    await sandbox.execute_command("touch go")
    assert (await waiting).stderr == "two"
    assert told == [("stdout", "one"), ("stderr", "two")]
    stream = sandbox.stream_command("echo a; echo b; exit 5")
    assert [line async for line in stream] == [("stdout", "a"), ("stdout", "b")]
    assert stream.result is not None
    assert (stream.result.exit_code, stream.result.stdout) == (5, "a\nb\n")
    async for _ in sandbox.stream_command("echo first; sleep 5432"):
        break
    await asyncio.sleep(0.2)
    assert (await sandbox.execute_command("ps -eo args | grep -c '[s]leep 5432'")).stdout == "0\n"


async def test_an_error_of_a_listener_is_raised_and_the_sandbox_stays(sandbox: BoxSandbox) -> None:
    def heed(name: str, line: str) -> None:
        raise RuntimeError(line)

    with pytest.raises(RuntimeError, match="one"):
        await sandbox.execute_command("echo one; sleep 1000", stream=heed, timeout=1000)

    async def wrong(name: str, line: str) -> None: ...

    with pytest.raises(TypeError, match="stream"):
        await sandbox.execute_command("true", stream=wrong)  # type: ignore[arg-type]
    assert (await sandbox.execute_command("echo on")).stdout == "on\n"
    big = await sandbox.execute_command(["wc", "-c"], stdin=b"x" * (5 << 20))
    assert big.stdout.strip() == str(5 << 20)
    unread = await sandbox.execute_command(["true"], stdin=b"x" * (5 << 20))
    assert unread.exit_code == 0


async def test_a_cancelled_caller_ends_its_command(sandbox: BoxSandbox) -> None:
    waiting = asyncio.create_task(sandbox.execute_command("touch began; sleep 6543"))
    while "began" not in (await sandbox.execute_command("ls")).stdout:
        await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.2)
    assert (await sandbox.execute_command("ps -eo args | grep -c '[s]leep 6543'")).stdout == "0\n"


async def test_output_is_bounded(make: Make) -> None:
    sandbox = await make(resource_limits={"output_bytes": 10_000})
    flood = await sandbox.execute_command("yes", timeout=60)
    assert (flood.status, len(flood.stdout), flood.metadata["ended"]) == (ExecutionStatus.ERROR, 10_000, "output")
    assert "more than 10,000 bytes" in flood.stderr


async def test_python_starts_clean_unless_asked_otherwise(make: Make) -> None:
    sandbox = await make()
    assert (await do(sandbox, "python_executor", code="x = 1; print(x)")).output == "1\n"
    fresh = await do(sandbox, "python_executor", code="print(x)")
    assert (fresh.status, fresh.success) == (ExecutionStatus.ERROR, False)
    assert "NameError" in str(fresh.error)
    assert (await do(sandbox, "python_executor", code="x = 2", stateful=True)).success
    assert (await do(sandbox, "python_executor", code="print(x)", stateful=True)).output == "2\n"
    assert not (await do(sandbox, "python_executor", code="print(x)")).success
    kept = await make(tools_config={"python_executor": {"stateful": True}})
    await do(kept, "python_executor", code="y = 3")
    assert (await do(kept, "python_executor", code="print(y)")).output == "3\n"
    assert not (await do(kept, "python_executor", code="print(y)", stateful=False)).success


async def test_python_sees_the_files_of_the_folder_and_modules_there(sandbox: BoxSandbox) -> None:
    await do(sandbox, "file_operation", operation="write", file_path="mine.py", content="value = 'ü'")
    await do(sandbox, "file_operation", operation="write", file_path="data.txt", content="data")
    result = await do(sandbox, "python_executor", code="import mine; print(mine.value, open('data.txt').read())")
    assert (result.output, result.error) == ("ü data\n", None)
    assert (await sandbox.execute_command("ls -A | grep -v pycache")).stdout.split() == ["data.txt", "mine.py"]


@pytest.mark.parametrize(
    ("tool", "parameters", "status", "error"),
    [
        ("python_executor", {"code": " "}, "error", "No code provided"),
        ("python_executor", {"code": "import time; time.sleep(99)", "timeout": 0.3}, "timeout", "timed out after 0.3"),
        ("python_executor", {"code": "import sys; sys.exit(3)"}, "error", "Execution failed with exit code 3"),
        ("python_executor", {"code": "import os; os.kill(os.getpid(), 11)"}, "error", "ended by signal 11"),
        ("python_executor", {}, "error", "Invalid input: code: Field required"),
        ("python_executor", {"code": "1", "time_out": 1}, "error", "Invalid input: time_out: unknown field"),
        ("shell_executor", {"command": ""}, "error", "No command provided"),
        ("shell_executor", {"command": "exit 7"}, "error", "Command failed with exit code 7"),
        ("shell_executor", {"command": "sleep 99", "timeout": 0.3}, "timeout", "Command timed out after 0.3 seconds"),
        ("shell_executor", {"command": ["false"]}, "error", "Command failed with exit code 1"),
        ("bash", {"command": "echo no >&2; exit 1"}, "error", "no\n"),
        ("file_operation", {"operation": "read", "file_path": "none"}, "error", "read failed: none: No such file"),
        ("file_operation", {"operation": "write", "file_path": "x"}, "error", "Content is required for write"),
        ("file_operation", {"operation": "read", "file_path": ""}, "error", "No file path provided"),
        ("file_operation", {"operation": "move", "file_path": "x"}, "error", "Unknown operation: move; known: create"),
        ("file_operation", {"operation": "read", "file_path": "../x"}, "error", "Path is outside of /sandbox"),
        ("file_operation", {"operation": "read", "file_path": "/etc/passwd"}, "error", "Path is outside of /sandbox"),
        ("file_operation", {"operation": "write", "file_path": "/sandbox-evil/x", "content": ""}, "error", "outside"),
        ("file_operation", {"operation": "create", "file_path": "x", "encoding": "none"}, "error", "unknown encoding"),
        ("notebook_executor", {"code": ""}, "error", "No code provided"),
    ],
)  # fmt: skip
async def test_failures_are_explained_in_words(
    sandbox: BoxSandbox, tool: str, parameters: dict[str, object], status: str, error: str
) -> None:
    result = await sandbox.execute_tool(tool, parameters)
    assert (result.status, result.tool_name) == (status, tool)
    assert error in str(result.error)


async def test_only_configured_tools_are_available(make: Make) -> None:
    with pytest.raises(ValueError, match="tools_config: there is no tool 'no_such_tool'; known: "):
        await make(tools_config={"shell_executor": {}, "no_such_tool": {}})
    sandbox = await make(tools_config={"shell_executor": {}})
    assert list(sandbox.get_available_tools()) == ["shell_executor"]
    with pytest.raises(ValueError, match="Tool python_executor is not available"):
        await sandbox.execute_tool("python_executor", {"code": "1"})


async def test_tools_are_described_as_functions_for_models(make: Make) -> None:
    sandbox = await make(tools_config=["python_executor", "bash"])
    tools = sandbox.get_available_tools()
    function = tools["python_executor"]["function"]
    assert (tools["python_executor"]["type"], function["name"]) == ("function", "python_executor")
    assert function["parameters"]["required"] == ["code"]
    assert function["parameters"]["additionalProperties"] is False
    assert function["description"]
    assert tools["bash"]["function"]["name"] == "bash"


async def test_files_are_created_read_listed_and_deleted(sandbox: BoxSandbox) -> None:
    path = "/sandbox/deep/er/file.txt"
    assert (
        await do(sandbox, "file_operation", operation="create", file_path=path)
    ).output == f"File written successfully: {path}"
    assert (await do(sandbox, "file_operation", operation="read", file_path=path)).output == ""
    await do(sandbox, "file_operation", operation="write", file_path=path, content="grüße\n", encoding="latin-1")
    assert (
        await do(sandbox, "file_operation", operation="read", file_path=path, encoding="latin-1")
    ).output == "grüße\n"
    assert "file.txt" in (await do(sandbox, "file_operation", operation="list", file_path="deep/er")).output
    assert (await do(sandbox, "file_operation", operation="exists", file_path=path)).output == "exists"
    assert (
        await do(sandbox, "file_operation", operation="delete", file_path="deep")
    ).output == "Successfully deleted: deep"
    assert (await do(sandbox, "file_operation", operation="exists", file_path=path)).output == "does not exist"
    assert not (await do(sandbox, "file_operation", operation="delete", file_path="/sandbox")).success


async def test_links_and_odd_files_are_not_followed(sandbox: BoxSandbox) -> None:
    await sandbox.execute_command(
        "ln -s /etc out; ln -s /etc/passwd secret; ln -s new dangling; mkfifo pipe; mkdir inside"
    )
    for path in ("out/passwd", "secret", "pipe", "inside"):
        result = await do(sandbox, "file_operation", operation="read", file_path=path)
        assert not result.success, path
        assert "root" not in str(result.output)
    for path in ("out/evalpool", "dangling", "pipe"):
        assert not (await do(sandbox, "file_operation", operation="write", file_path=path, content="x")).success
    assert (await sandbox.execute_command("ls -A | sort")).stdout.split() == [
        "dangling",
        "inside",
        "out",
        "pipe",
        "secret",
    ]
    assert (await do(sandbox, "file_operation", operation="delete", file_path="out")).success
    assert (await sandbox.execute_command("test -d /etc")).status is ExecutionStatus.SUCCESS


async def test_archives_and_folders_are_copied_into_a_sandbox(sandbox: BoxSandbox, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("a")
    assert await sandbox.put_dir(tmp_path, "/sandbox/copied")
    assert await sandbox.put_file("/sandbox/other/b.txt", "b")
    assert (await sandbox.execute_command("cat copied/sub/a.txt other/b.txt")).stdout == "ab"
    assert await sandbox.put_file("bytes", b"\x00\xff")
    assert await sandbox.get_file("/sandbox/bytes") == b"\x00\xff"
    read = await do(sandbox, "file_operation", operation="read", file_path="bytes", encoding="base64")
    assert read.output == "AP8="
    await do(sandbox, "file_operation", operation="write", file_path="again", content="AP8=", encoding="base64")
    assert await sandbox.get_file("again") == b"\x00\xff"
    with tarfile.open(fileobj=io.BytesIO(await sandbox.get_archive("copied"))) as archive:
        assert archive.getnames() == ["sub", "sub/a.txt"]
    with pytest.raises(ValueError, match="outside"):
        await sandbox.put_file("/etc/b.txt", "b")
    with pytest.raises(OSError, match="No such file"):
        await sandbox.get_file("none")
    (tmp_path / "b.txt").hardlink_to(tmp_path / "sub" / "a.txt")
    assert await sandbox.put_dir(tmp_path, "linked")
    assert await sandbox.put_dir(tmp_path, "linked")  # and again, over what is there
    await sandbox.execute_command("chmod 000 linked/sub linked/b.txt")
    with tarfile.open(fileobj=io.BytesIO(await sandbox.get_archive("linked"))) as archive:
        found = {entry.name: entry for entry in archive}
    assert [*found] == ["b.txt", "sub", "sub/a.txt"]
    assert [found[name].isreg() for name in found] == [True, False, True]
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../../escape"))
    with pytest.raises(OSError, match="is outside the folder"):
        await sandbox.put_archive("/sandbox", evil.getvalue())
    with pytest.raises(OSError, match="ReadError"):
        await sandbox.put_archive("/sandbox", b"garbage" * 1000)
    with pytest.raises(FileNotFoundError):
        await sandbox.put_dir(tmp_path / "none", "/sandbox")


async def test_a_running_sandbox_reports_its_resource_usage(sandbox: BoxSandbox) -> None:
    code = "data = b'x' * (60 << 20); open('ready', 'w'); import time; time.sleep(1000)"
    working = asyncio.create_task(sandbox.execute_python(code, 100))
    while "ready" not in (await sandbox.execute_command("ls")).stdout:
        await asyncio.sleep(0.05)
    usage = sandbox.get_info().metadata["usage"]
    assert usage["memory_bytes"] > 60 << 20
    assert usage["processes"] >= 1
    assert usage["cpu_seconds"] > 0
    working.cancel()
    await asyncio.wait((working,))


async def test_commands_see_the_configured_environment_variables(make: Make) -> None:
    sandbox = await make(env_vars={"GIVEN": "value"})
    assert (await sandbox.execute_command("echo $GIVEN")).stdout == "value\n"
    for tool in ("python_executor", "notebook_executor"):
        assert "value" in (await do(sandbox, tool, code="import os; print(os.environ['GIVEN'])")).output


async def test_a_reset_removes_files_processes_and_state(sandbox: BoxSandbox) -> None:
    await sandbox.execute_command("echo 1 > file; mkdir folder")
    await do(sandbox, "notebook_executor", code="secret = 1")
    await do(sandbox, "python_executor", code="secret = 1", stateful=True)
    assert await sandbox.reset()
    assert (await sandbox.execute_command("ls -A")).stdout == ""
    for tool, more in (("notebook_executor", {}), ("python_executor", {"stateful": True})):
        assert "NameError" in str((await do(sandbox, tool, code="secret", **more)).error)
