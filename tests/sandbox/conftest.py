"""Sandboxes of every kind, for the tests that all kinds must pass."""

from collections.abc import AsyncIterator, Iterator

import docker
import pytest

from schemas.settings import Settings, settings
from worker.sandbox.base import Sandbox, Shape
from worker.sandbox.docker import DockerSandbox
from worker.sandbox.engine import Engine
from worker.sandbox.fake import FakeSandbox

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


@pytest.fixture(params=["docker", "fake"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """A started sandbox of each kind."""
    made: Sandbox = (
        FakeSandbox(SHAPE)
        if request.param == "fake"
        else DockerSandbox(SHAPE, request.getfixturevalue("engine"), settings=settings())
    )
    await made.start()
    yield made
    await made.close()
