"""The parts with which a worker evaluates jobs, without its queue."""

import asyncio
from collections.abc import AsyncIterator

import docker
import pytest
from docker.errors import ImageNotFound

from evalpool.schemas import JobSpec
from evalpool.schemas.lease import Lease
from evalpool.schemas.result import Result
from evalpool.schemas.settings import Settings, settings
from evalpool.worker.artifacts import Artifacts
from evalpool.worker.evaluation import evaluate
from evalpool.worker.pool import Pool
from evalpool.worker.sandbox.base import Shape
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.sandbox.engine import Engine
from tests.conftest import missing

Parts = tuple[Pool, Artifacts]
SECONDS = 1800
"""Seconds within which a job must have ended, even on a slow machine."""


@pytest.fixture
async def worker_parts(engine_client: docker.DockerClient) -> AsyncIterator[Parts]:
    """A pool of real containers, without a queue."""
    try:
        engine_client.images.get(Settings().code_image)
    except ImageNotFound:
        missing(f"no image {Settings().code_image} here: evalpool images build code")
    engine = Engine(60)

    async def make(shape: Shape) -> DockerBox:
        sandbox = DockerBox(shape, engine, settings=settings())
        await sandbox.start()
        return sandbox

    pool = Pool(make, 1, 1000)
    yield pool, Artifacts()
    await pool.close()
    engine.close()


async def evaluated(parts: Parts, spec: JobSpec) -> Result:
    """Return the result of one job."""
    lease = Lease(job_id="b-000000", batch_id="b", spec=spec, attempt=1, created_at=0, started_at=0)
    return await asyncio.wait_for(evaluate(lease, *parts, settings()), SECONDS)
