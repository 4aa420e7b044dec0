"""The types of sandbox: how they fail, what they refuse, and how to register custom types and tools."""

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import pytest
from pydantic import BaseModel

import evalpool.api.sandbox.local as local
from evalpool.api.sandbox import (
    DockerSandbox,
    DockerSandboxConfig,
    ExecutionStatus,
    LocalSandboxManager,
    Sandbox,
    SandboxConfig,
    SandboxFactory,
    SandboxStatus,
    SandboxType,
    Tool,
    ToolFactory,
    ToolParameters,
    register_sandbox,
    register_tool,
)
from evalpool.schemas.errors import InvalidConfig, SandboxLost, SetupError
from tests.conftest import ROOT, containers, eventually


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"privileged": True}, "privileged"),
        ({"network_enabled": True}, "network_enabled"),
        ({"network": "host"}, "network"),
        ({"ports": {"80/tcp": 80}}, "ports"),
        ({"volumes": {"/etc": {"bind": "/etc", "mode": "ro"}}}, "volumes"),
        ({"volumes": {"/etc": {"bind": "/sandbox/../etc"}}}, "volumes"),
        ({"entrypoint": ["sh"]}, "entrypoint"),
        ({"memory_limit": "much"}, "memory_limit"),
        ({"memory_limit": "1k"}, "memory_limit"),
        ({"cpu_limit": 0}, "cpu_limit"),
        ({"timeout": -1}, "timeout"),
        ({"working_dir": "/etc/x"}, "working_dir"),
        ({"working_dir": "relative"}, "working_dir"),
        ({"memroy_limit": "1g"}, "memroy_limit"),
        ({"resource_limits": {"files": 1}}, "files"),
    ],
)
def test_options_that_weaken_isolation_or_are_unknown_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    for make in (lambda: DockerSandboxConfig(**config), lambda: SandboxFactory.create_sandbox("docker", config)):
        with pytest.raises(match=field) as raised:
            make()
        assert isinstance(raised.value, ValueError)
        assert not any(word in str(raised.value) for word in ("validation error", "pydantic", "function-", "Input"))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DockerSandboxConfig(imgae="x"), "imgae: unknown field (did you mean image?); DockerSandboxConfig has"),
        (lambda: DockerSandboxConfig(timeout="soon"), "timeout: it must be a number"),
        (lambda: DockerSandboxConfig(command={}), "command: it must be text or a list of strings, not dict"),
        (lambda: DockerSandboxConfig(memory_limit=512), "memory_limit: it must be text"),
        (lambda: DockerSandboxConfig(privileged=True), "privileged: a sandbox has no privileges"),
        (lambda: DockerSandboxConfig(resource_limits={"disk": 1}), "resource_limits.disk: unknown field"),
        (lambda: setattr(DockerSandboxConfig(), "timeout", -1), "timeout: it must be greater than 0"),
        (lambda: setattr(DockerSandboxConfig(), "timeuot", 1), "timeuot: "),
        (lambda: LocalSandboxManager(pool_sise=1), "pool_sise: unknown field (did you mean pool_size?)"),
        (lambda: SandboxFactory.create_sandbox("docker", "x"), "config: it must be a DockerSandboxConfig or a mapping"),
        (lambda: SandboxFactory.create_sandbox("docker", {1: 2}), "1: unknown field"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_in_a_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        make()
    assert str(raised.value).startswith(sentence)


async def test_a_wrong_argument_of_a_call_is_refused_in_a_sentence() -> None:
    async with LocalSandboxManager() as manager, SandboxFactory.create_sandbox("dummy") as sandbox:
        calls: dict[str, Callable[[], Any]] = {
            "code: it must be text, not int": lambda: sandbox.execute_python(5),
            "stdin: it must be text or bytes, not int": lambda: sandbox.execute_command("cat", stdin=5),
            "file_path: it must be a path as text, not int": lambda: sandbox.put_file(5, ""),
            "content: it must be text or bytes, not dict": lambda: sandbox.put_file("a", {}),
            "data: it must be text or bytes, not dict": lambda: sandbox.put_archive("a", {1: 2}),
            "status_filter: 'bogus' is not one of initializing, running": lambda: manager.list_sandboxes("bogus"),
        }
        for sentence, call in calls.items():
            with pytest.raises(ValueError, match=sentence):
                await call()
    with pytest.raises(InvalidConfig, match="config: it must be a SandboxManagerConfig, not int"):
        LocalSandboxManager(5)


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="nowhere is not registered; known: docker, docker_notebook"):
        SandboxFactory.create_sandbox("nowhere")


def test_statuses_only_move_where_they_can() -> None:
    sandbox = SandboxFactory.create_sandbox(SandboxType.DUMMY)
    with pytest.raises(ValueError, match="initializing cannot become idle"):
        sandbox.update_status(SandboxStatus.IDLE)
    sandbox.update_status(SandboxStatus.STOPPED)
    with pytest.raises(ValueError, match="stopped cannot become running"):
        sandbox.update_status(SandboxStatus.RUNNING)


async def test_a_start_that_fails_ends_in_error_and_leaves_nothing(engine_client: docker.DockerClient) -> None:
    before = containers(engine_client, os.getpid())
    sandbox = SandboxFactory.create_sandbox(SandboxType.DOCKER, {"image": "evalpool/none:1"})
    with pytest.raises(SetupError, match="evalpool/none"):
        await sandbox.start()
    assert sandbox.status is SandboxStatus.ERROR
    assert "evalpool/none:1" in sandbox.metadata["error"]
    assert containers(engine_client, os.getpid()) == before
    await sandbox.stop()
    assert sandbox.get_info().metadata["error"]
    bad = SandboxFactory.create_sandbox(SandboxType.DOCKER, {"tools_config": {"python_executor": {"staeful": True}}})
    with pytest.raises(ValueError, match=r"tools_config.python_executor: staeful: unknown field"):
        await bad.start()
    assert bad.status is SandboxStatus.ERROR
    eventually(lambda: containers(engine_client, os.getpid()) == before)


async def test_a_container_that_dies_is_noticed_and_ends_in_error(engine_client: docker.DockerClient) -> None:
    config = DockerSandboxConfig(tools_config=["python_executor", "shell_executor"])
    sandbox = SandboxFactory.create_sandbox(SandboxType.DOCKER, config)
    await sandbox.start()
    container = engine_client.containers.get(sandbox.metadata["container_id"])
    running = asyncio.create_task(sandbox.execute_tool("shell_executor", {"command": "sleep 1000"}))
    await asyncio.sleep(0.5)
    container.kill()
    result = await running
    assert result.status is ExecutionStatus.ERROR
    assert "The sandbox was lost" in str(result.error)
    assert sandbox.status is SandboxStatus.ERROR
    with pytest.raises(ValueError, match="not active"):
        await sandbox.execute_tool("python_executor", {"code": "1"})
    await sandbox.stop()
    idle = SandboxFactory.create_sandbox(SandboxType.DOCKER, config)
    await idle.start()
    engine_client.containers.get(idle.metadata["container_id"]).kill()
    for _ in range(100):
        await asyncio.sleep(0.05)
        if idle.get_info().status is SandboxStatus.ERROR:
            break
    assert idle.metadata["error"] == "the sandbox died"
    await idle.stop()


async def test_memory_and_processes_are_limited(engine_client: docker.DockerClient) -> None:
    config = DockerSandboxConfig(
        memory_limit="64m", resource_limits={"processes": 20}, tools_config=["python_executor"]
    )
    async with SandboxFactory.create_sandbox(SandboxType.DOCKER, config) as sandbox:
        hog = await sandbox.execute_tool("python_executor", {"code": "x = bytearray(500 << 20)"})
        assert hog.status is ExecutionStatus.ERROR
        assert hog.metadata["oom_killed"] or "MemoryError" in str(hog.error)
        bomb = await sandbox.execute_command("bomb() { bomb | bomb & }; bomb; sleep 2", timeout=10)
        assert bomb.status is not ExecutionStatus.SUCCESS or "fork" in bomb.stderr
        assert (await sandbox.execute_command("echo alive")).stdout == "alive\n"
        escaped = (
            "import os, time\nif not os.fork():\n os.setsid()\n if not os.fork():\n  time.sleep(7654)\n os._exit(0)\n"
        )
        await sandbox.execute_tool("python_executor", {"code": escaped})
        assert (await sandbox.execute_command("ps -eo args | grep -c '[7]654'")).stdout == "0\n"


async def test_folders_of_the_host_are_copied_in_and_back(engine_client: docker.DockerClient, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    volumes = {
        str(tmp_path / "in"): {"bind": "/sandbox/in", "mode": "ro"},
        str(tmp_path / "out"): {"bind": "/sandbox/out", "mode": "rw"},
    }
    async with DockerSandbox(DockerSandboxConfig(volumes=volumes)) as sandbox:
        line = "cat in/a.txt > out/b.txt; echo new > in/a.txt; cd out; ln -s /etc/passwd link; mkdir sub; mkfifo pipe"
        assert (await sandbox.execute_command(line)).exit_code == 0
        assert await sandbox.reset()
        assert (await sandbox.execute_command("cat in/a.txt; ls out")).stdout == "a"
        assert (await sandbox.execute_command(line)).exit_code == 0
    assert (tmp_path / "in" / "a.txt").read_text() == "a"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["b.txt", "sub"]
    assert (tmp_path / "out" / "b.txt").read_text() == "a"


async def test_a_missing_bubblewrap_is_a_loud_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "bubblewrap", lambda: None)
    async with SandboxFactory.create_sandbox(SandboxType.LOCAL_PROCESS) as sandbox:
        assert sandbox.get_info().metadata["walls"] == "none"
        assert (await sandbox.execute_command("echo 1")).stdout == "1\n"
        left = await sandbox.execute_command("sleep 1000 & setsid sleep 1.5 & echo hi", timeout=600)
        assert (left.status, left.stdout) == (ExecutionStatus.SUCCESS, "hi\n")
    assert "WARNING: LOCAL_PROCESS without bubblewrap" in capsys.readouterr().err


async def test_containers_of_a_killed_process_are_removed(bubblewrap: None, tmp_path: Path) -> None:
    script = """
import asyncio, os
from evalpool.api.sandbox import *
async def main():
    async with SandboxFactory.create_sandbox("local_process") as sandbox:
        asyncio.create_task(sandbox.execute_command("sleep 3456"))
        await asyncio.sleep(0.5)
        print(sandbox.box.id, flush=True)
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("local-")
    assert len(list(tmp_path.iterdir())) == 1
    eventually(lambda: subprocess.run(["pgrep", "-f", "sleep 3456"], check=False).returncode == 1)
    subprocess.run(
        [sys.executable, "-c", script.replace("os.kill", "max")], env=env, cwd=tmp_path, timeout=60, check=True
    )
    assert list(tmp_path.iterdir()) == []


async def test_bubblewrap_confines_a_local_process(bubblewrap: None, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    async with SandboxFactory.create_sandbox(SandboxType.LOCAL_PROCESS, {"env_vars": {"X": "1"}}) as sandbox:
        lines = {
            f"cat {secret}": False,
            "cat /etc/shadow": False,
            "ls /root /home": False,
            "touch /usr/evalpool": False,
            "kill -9 -1; echo still": True,
            "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 6379), 1)'": False,
            "unshare -U true": False,
            "id -u | grep -qx 0": False,
            "cat /proc/1/environ | grep -q PATH": False,
        }
        for line, allowed in lines.items():
            result = await sandbox.execute_command(line)
            assert (result.exit_code == 0) is allowed, (line, result)
    with pytest.raises(SandboxLost):
        await sandbox.execute_command("true")


async def test_registered_sandbox_types_are_created_by_name_and_run_tools() -> None:
    @register_sandbox("tuples")
    class Tuples(Sandbox):
        @property
        def sandbox_type(self) -> str:
            return "tuples"

        async def start(self) -> None:
            self.update_status(SandboxStatus.RUNNING)
            await self.initialize_tools()

        async def stop(self) -> None:
            self.update_status(SandboxStatus.STOPPED)

        async def cleanup(self) -> None:
            return

        async def execute_command(  # type: ignore[override]
            self, command: str | list[str], timeout: float | None = None, stream: bool = True
        ) -> tuple[int, str, str]:
            return 0, f"did {command}", ""

        async def get_execution_context(self) -> None:
            return None

    config = SandboxConfig(tools_config=["shell_executor", "python_executor", "notebook_executor"])
    async with SandboxFactory.create_sandbox("tuples", config) as sandbox:
        assert (await sandbox.execute_tool("shell_executor", {"command": "this"})).output == "did this"
        assert "did ['python3'" in (await sandbox.execute_tool("python_executor", {"code": "1"})).output
        assert "cannot start a command in the background" in str(
            (await sandbox.execute_tool("notebook_executor", {"code": "1"})).error
        )
        assert (await sandbox.execute_command("that")).stdout == "did that"
        await sandbox.initialize_tools()
        assert sandbox.get_info().type == "tuples"


async def test_a_custom_tool_takes_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    @register_tool("shout")
    class Shout(Tool):
        """Say it louder."""

        class Parameters(BaseModel):
            text: str

        async def execute(self, sandbox: Sandbox, text: str) -> str:
            return (await sandbox.execute_command(["tr", "a-z", "A-Z"], stdin=text)).stdout

    async with SandboxFactory.create_sandbox(SandboxType.DUMMY, {"tools_config": ["shout"]}) as sandbox:
        result = await sandbox.execute_tool("shout", {"text": "hello"})
        assert (result.output, result.success, result.tool_name) == ("HELLO", True, "shout")
        assert result.execution_time is not None
        assert sandbox.get_available_tools()["shout"]["function"]["description"] == "Say it louder."
        monkeypatch.setattr(Shout, "execute", lambda *_, **__: 1 // 0)
        assert (
            await sandbox.execute_tool("shout", {"text": ""})
        ).error == "ZeroDivisionError: integer division or modulo by zero"
        wrong = await sandbox.execute_tool("shout", {})
        assert wrong.error == "Invalid input: text: Field required"


async def test_the_example_tool_works() -> None:
    spec = importlib.util.spec_from_file_location("example_tool", ROOT / "examples" / "tool.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["example_tool"] = module
    spec.loader.exec_module(module)
    async with SandboxFactory.create_sandbox(SandboxType.DUMMY, {"tools_config": ["word_count"]}) as sandbox:
        assert (await sandbox.execute_tool("word_count", {"text": "one two three"})).output == "3"


def _plain() -> type:
    class Wrong:
        pass

    return Wrong


def _tool(**parts: Any) -> type:
    async def execute(self: Tool, sandbox: Any) -> str:
        return ""

    return type("Mine", (Tool,), {"__doc__": "Something.", "execute": execute, **parts})


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (_plain(), "is not a subclass of Tool"),
        (len, "is not a subclass of Tool"),
        (_tool(Parameters=_plain()), "Parameters must be a subclass of pydantic"),
        (_tool(Options=ToolParameters), "Options must be a subclass of ToolOptions"),
        (_tool(execute=lambda self, sandbox: ""), "execute must be a coroutine"),
        (_tool(__doc__=None), "the docstring, which tells"),
    ],
)
def test_an_invalid_tool_is_refused_when_it_is_registered(tool: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        register_tool("mine")(tool)
    assert "mine" not in ToolFactory.get_available_tools()


def test_invalid_names_and_sandbox_classes_are_refused() -> None:
    for name in ("", "two words", "x" * 65, _tool()):
        with pytest.raises(ValueError, match="is not a valid name for a tool"):
            register_tool(name)(_tool())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a subclass of Sandbox"):
        register_sandbox("mine")(_plain())


async def test_a_tool_for_containers_works_in_those_for_notebooks() -> None:
    tool = _tool(required_sandbox_types=(SandboxType.DOCKER,), name="mine")()
    for kind, offered in (("docker", True), ("docker_notebook", True), ("local_process", False)):
        sandbox = SandboxFactory.create_sandbox(kind)
        sandbox.add_tool(tool)
        assert (sandbox.get_tool("mine") is not None) is offered
