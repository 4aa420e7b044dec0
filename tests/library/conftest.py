"""Sandboxes of every type, for the tests that all of them must pass."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from evalpool.api.sandbox import Sandbox, SandboxFactory, SandboxType
from evalpool.api.sandbox.box import BoxSandbox
from evalpool.worker.sandbox.engine import Engine
from tests.conftest import missing

TOOLS = ["python_executor", "shell_executor", "file_operation", "notebook_executor"]
Make = Callable[..., Awaitable[BoxSandbox]]


@pytest.fixture
def notebook_image(engine_client: Any) -> None:
    """These tests need the image for notebooks."""
    if not Engine(60).has("evalpool/notebook:3.11"):
        missing("no image evalpool/notebook:3.11 here")


@pytest.fixture(params=["docker warm", "docker fresh", "local process", "fake"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Return a function that starts sandboxes of one type. They are stopped at the end."""
    made: list[Sandbox] = []
    kind = {"local process": SandboxType.LOCAL_PROCESS, "fake": SandboxType.DUMMY}.get(
        request.param, SandboxType.DOCKER
    )
    if kind is SandboxType.DOCKER:
        request.getfixturevalue("notebook_image")
    if kind is SandboxType.LOCAL_PROCESS:
        request.getfixturevalue("bubblewrap")

    async def make(**config: Any) -> BoxSandbox:
        sandbox = SandboxFactory.create_sandbox(kind, {"tools_config": TOOLS} | config)
        assert isinstance(sandbox, BoxSandbox)
        await sandbox.start()
        made.append(sandbox)
        if request.param == "docker warm":  # somebody has had it before
            await sandbox.execute_command("echo left > left; sleep 1000 & echo left > /tmp/left")
            if sandbox.get_tool("notebook_executor"):
                await sandbox.execute_tool("notebook_executor", {"code": "left = 1"})
            assert await sandbox.reset()
        return sandbox

    yield make
    for sandbox in made:
        await sandbox.stop()


@pytest.fixture
async def sandbox(make: Make) -> BoxSandbox:
    """Start a sandbox with the usual tools."""
    return await make()
