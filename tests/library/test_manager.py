"""The manager of several sandboxes, and its pool."""

import asyncio
import os

import docker
import pytest

from evalpool.api.sandbox import (
    LocalSandboxManager,
    SandboxManagerConfig,
    SandboxManagerFactory,
    SandboxManagerType,
    SandboxStatus,
    SandboxType,
)
from tests.conftest import containers, eventually

DUMMY = {"tools_config": ["python_executor", "shell_executor", "notebook_executor"]}


async def test_sandboxes_are_made_listed_used_and_deleted() -> None:
    async with LocalSandboxManager() as manager:
        first = await manager.create_sandbox(SandboxType.DUMMY, DUMMY)
        second = await manager.create_sandbox(SandboxType.DUMMY, DUMMY, sandbox_id="mine")
        assert second == "mine"
        with pytest.raises(ValueError, match="mine already"):
            await manager.create_sandbox(SandboxType.DUMMY, DUMMY, sandbox_id="mine")
        assert {info.id for info in await manager.list_sandboxes()} == {first, second}
        assert (await manager.execute_tool(first, "shell_executor", {"command": "echo hello"})).output == "hello\n"
        assert "python_executor" in await manager.get_sandbox_tools(first)
        assert await manager.stop_sandbox(first)
        assert [info.id for info in await manager.list_sandboxes(SandboxStatus.STOPPED)] == [first]
        assert [info.id for info in await manager.list_sandboxes("running")] == [second]
        with pytest.raises(ValueError, match="is not active"):
            await manager.execute_tool(first, "shell_executor", {"command": "echo"})
        stats = await manager.get_stats()
        assert (stats["total_sandboxes"], stats["status_counts"]) == (2, {"stopped": 1, "running": 1})
        assert await manager.delete_sandbox(first)
        assert not await manager.delete_sandbox(first)
        assert await manager.get_sandbox_info(first) is None
        with pytest.raises(ValueError, match=f"Sandbox {first} not found"):
            await manager.execute_tool(first, "shell_executor", {"command": "echo"})
        left = await manager.get_sandbox("mine")
    assert left is not None
    assert left.status is SandboxStatus.STOPPED


async def test_a_sandbox_that_cannot_start_leaves_nothing_behind() -> None:
    async with LocalSandboxManager() as manager:
        with pytest.raises(RuntimeError, match=r"Failed to create sandbox: .*staeful"):
            await manager.create_sandbox(SandboxType.DUMMY, {"tools_config": {"python_executor": {"staeful": 1}}})
        assert await manager.list_sandboxes() == []


async def test_a_pool_lends_sandboxes_and_resets_them() -> None:
    async with LocalSandboxManager() as manager:
        with pytest.raises(ValueError, match="pool is empty, call initialize_pool first"):
            await manager.execute_tool_in_pool("python_executor", {"code": "1"})
        ids = await manager.initialize_pool(pool_size=2, sandbox_type=SandboxType.DUMMY, config=DUMMY)
        assert len(ids) == 2
        assert await manager.initialize_pool(pool_size=2, sandbox_type=SandboxType.DUMMY, config=DUMMY) == ids
        assert {info.status for info in await manager.list_sandboxes()} == {SandboxStatus.IDLE}
        code = "import os; print(os.listdir()); open('left', 'w'); print({})"
        results = await asyncio.gather(
            *(manager.execute_tool_in_pool("python_executor", {"code": code.format(n)}) for n in range(10))
        )
        assert [result.output for result in results] == [f"[]\n{n}\n" for n in range(10)]
        for _ in range(3):
            kept = await manager.execute_tool_in_pool("notebook_executor", {"code": "secret"})
            assert "NameError" in str(kept.error)
            await manager.execute_tool_in_pool("notebook_executor", {"code": "secret = 1"})
        stats = await manager.get_stats()
        assert (stats["pool_size"], stats["pool_enabled"]) == (2, True)
        with pytest.raises(ValueError, match="Tool none is not available"):
            await manager.execute_tool_in_pool("none", {})
        assert (await manager.execute_tool_in_pool("python_executor", {"code": "print(1)"})).output == "1\n"


async def test_waiting_for_a_pool_can_be_limited() -> None:
    async with LocalSandboxManager() as manager:
        await manager.initialize_pool(pool_size=1, sandbox_type=SandboxType.DUMMY, config=DUMMY)
        slow = asyncio.create_task(manager.execute_tool_in_pool("shell_executor", {"command": "sleep 5"}))
        await asyncio.sleep(0.3)
        assert [info.status for info in await manager.list_sandboxes()] == [SandboxStatus.BUSY]
        with pytest.raises(TimeoutError, match=r"Timeout waiting for available sandbox from pool after 0.2s"):
            await manager.execute_tool_in_pool("shell_executor", {"command": "true"}, timeout=0.2)
        slow.cancel()
        await asyncio.wait((slow,))
        assert (await manager.execute_tool_in_pool("shell_executor", {"command": "echo on"})).output == "on\n"


async def test_dead_members_of_a_pool_are_replaced(engine_client: docker.DockerClient) -> None:
    async with LocalSandboxManager() as manager:
        config = {"tools_config": ["python_executor"]}
        await manager.initialize_pool(pool_size=2, sandbox_type=SandboxType.DOCKER, config=config)
        for container in containers(engine_client, os.getpid()):
            engine_client.api.kill(container)
        await asyncio.sleep(0.5)
        codes = [{"code": f"print({number})"} for number in range(6)]
        results = await asyncio.gather(*(manager.execute_tool_in_pool("python_executor", code) for code in codes))
        assert [result.output for result in results] == [f"{number}\n" for number in range(6)]
        assert {info.status for info in await manager.list_sandboxes()} == {SandboxStatus.IDLE}
    eventually(lambda: not containers(engine_client, os.getpid()))


async def test_dead_sandboxes_are_removed_from_the_list() -> None:
    async with LocalSandboxManager(SandboxManagerConfig(cleanup_interval=0.1)) as manager:
        await manager.create_sandbox(SandboxType.DUMMY, DUMMY)
        dead = await manager.get_sandbox(await manager.create_sandbox(SandboxType.DUMMY, DUMMY))
        assert dead is not None
        dead.fail("it broke")
        for _ in range(100):
            await asyncio.sleep(0.05)
            if len(await manager.list_sandboxes()) == 1:
                break
        assert len(await manager.list_sandboxes()) == 1


async def test_the_factory_picks_a_manager() -> None:
    assert isinstance(SandboxManagerFactory.create_manager(), LocalSandboxManager)
    config = SandboxManagerConfig(cleanup_interval=600)
    explicit = SandboxManagerFactory.create_manager(SandboxManagerType.LOCAL, config)
    assert (await explicit.get_stats())["cleanup_interval"] == 600
    assert SandboxManagerFactory.get_registered_types() == ["local"]
    with pytest.raises(ValueError, match="http is not supported"):
        SandboxManagerFactory.create_manager(base_url="http://127.0.0.1:1")


async def test_a_pool_refuses_impossible_calls_and_keeps_nothing() -> None:
    async with LocalSandboxManager() as manager:
        (member,) = await manager.initialize_pool(1, SandboxType.DUMMY, DUMMY)
        with pytest.raises(ValueError, match="belongs to the pool"):
            await manager.execute_tool(member, "shell_executor", {"command": "echo secret > left"})
        with pytest.raises(ValueError, match="Tool no_such_tool is not available"):
            await manager.execute_tool_in_pool("no_such_tool", {})
        assert (await manager.get_stats())["pool"]["created"] == 1
        with pytest.raises(ValueError, match="a pool of other sandboxes"):
            await manager.initialize_pool(1, SandboxType.DUMMY, {"tools_config": ["shell_executor"]})
        assert await manager.initialize_pool(1, SandboxType.DUMMY, DUMMY) == [member]
    volumes = {"volumes": {"/tmp/none": {"bind": "/sandbox/x"}}}
    with pytest.raises(ValueError, match="volumes: a pool's volumes must have the mode 'ro'"):
        await LocalSandboxManager().initialize_pool(1, SandboxType.DOCKER, volumes)


async def test_dead_members_of_a_pool_are_stopped_only_once() -> None:
    async with LocalSandboxManager() as manager:
        await manager.initialize_pool(3, SandboxType.DUMMY, DUMMY)
        for box in manager._members:
            await box.close()
        lists = await asyncio.gather(*(manager.list_sandboxes() for _ in range(4)))
        assert lists[-1] == []
        assert (await manager.execute_tool_in_pool("shell_executor", {"command": "echo on"})).output == "on\n"


async def test_a_stopping_manager_waits_for_sandboxes_that_are_starting(engine_client: docker.DockerClient) -> None:
    manager = LocalSandboxManager()
    await manager.initialize_pool(1, SandboxType.DOCKER, {"tools_config": ["shell_executor"]})
    for box in manager._members:
        await box.close()
    call = asyncio.create_task(manager.execute_tool_in_pool("shell_executor", {"command": "echo on"}))
    await asyncio.sleep(0.05)
    await manager.stop()
    await asyncio.wait((call,))
    assert isinstance(call.exception(), Exception) or call.result()
    eventually(lambda: not containers(engine_client, os.getpid()))
    assert manager._members == {}
