"""Fixtures: sandboxes of every kind, for the tests that all kinds must pass."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import docker
import pytest

from evalpool.schemas.settings import Settings, settings
from evalpool.worker.sandbox.base import Box, Shape
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.sandbox.engine import Engine
from evalpool.worker.sandbox.fake import FakeBox
from evalpool.worker.sandbox.local import LocalBox

SHAPE = Shape(Settings.model_fields["image"].default, 128, 32, 16)


@pytest.fixture
def engine(engine_client: docker.DockerClient) -> Iterator[Engine]:
    engine = Engine(60)
    yield engine
    engine.close()


@pytest.fixture
async def box(engine: Engine) -> AsyncIterator[DockerBox]:
    """A started container."""
    sandbox = DockerBox(SHAPE, engine, settings=settings())
    await sandbox.start()
    yield sandbox
    await sandbox.close()


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes are reached through the engine alone, as if they were on another machine."""
    monkeypatch.setattr("evalpool.worker.sandbox.docker.opened", lambda *_: None)


@pytest.fixture(params=["docker", "docker, attached", "local", "fake"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    """A started sandbox of each kind."""
    made: Box
    if request.param.startswith("docker"):
        if request.param != "docker":
            request.getfixturevalue("attached")
        made = DockerBox(replace(SHAPE, commands=8), request.getfixturevalue("engine"), settings=settings())
    elif request.param == "local":
        request.getfixturevalue("bubblewrap")
        made = LocalBox(SHAPE, walls=True)
    else:
        made = FakeBox(SHAPE)
    await made.start()
    yield made
    await made.close()
