"""Sandboxes of every kind, for the tests that all kinds must pass."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import docker
import pytest

from schemas.settings import Settings, settings
from worker.sandbox.base import Sandbox, Shape
from worker.sandbox.docker import DockerSandbox
from worker.sandbox.engine import Engine
from worker.sandbox.fake import FakeSandbox
from worker.sandbox.local import LocalSandbox

SHAPE = Shape(Settings.model_fields["image"].default, 128, 32, 16)


@pytest.fixture
def engine(engine_client: docker.DockerClient) -> Iterator[Engine]:
    engine = Engine(60)
    yield engine
    engine.close()


@pytest.fixture
async def box(engine: Engine) -> AsyncIterator[DockerSandbox]:
    """A started container."""
    sandbox = DockerSandbox(SHAPE, engine, settings=settings())
    await sandbox.start()
    yield sandbox
    await sandbox.close()


@pytest.fixture(params=["docker", "local", "fake"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """A started sandbox of each kind."""
    made: Sandbox
    if request.param == "docker":
        made = DockerSandbox(replace(SHAPE, commands=8), request.getfixturevalue("engine"), settings=settings())
    elif request.param == "local":
        request.getfixturevalue("bubblewrap")
        made = LocalSandbox(SHAPE, walls=True)
    else:
        made = FakeSandbox(SHAPE)
    await made.start()
    yield made
    await made.close()
