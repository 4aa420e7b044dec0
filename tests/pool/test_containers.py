"""The pool with real containers."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import docker
import pytest

from evalpool.schemas import Limits
from evalpool.schemas.settings import settings
from evalpool.worker.pool import Pool
from evalpool.worker.sandbox.base import Box, Shape
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.sandbox.engine import Engine
from tests.conftest import PATIENCE
from tests.sandbox.conftest import SHAPE
from tests.sandbox.test_contract import python

pytestmark = pytest.mark.docker


class Maker:
    """Makes and remembers containers."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.made = engine, list[DockerBox]()

    async def __call__(self, shape: Shape) -> Box:
        sandbox = DockerBox(shape, self.engine, settings=settings())
        self.made.append(sandbox)
        await sandbox.start()
        return sandbox


@pytest.fixture
def maker(engine_client: docker.DockerClient) -> Iterator[Maker]:
    engine = Engine(60)
    yield Maker(engine)
    engine.close()


async def test_four_memory_limits_in_turn_need_no_container(maker: Maker) -> None:
    pool = Pool(maker, slots=1, max_uses=100)
    try:
        await pool.warm(SHAPE)
        for turn in range(8):
            mib = 48 * (1 + turn % 4)
            hog = python(f"x = bytearray({mib * 3 // 2} << 20)", limits=Limits(cpu_seconds=60))
            async with pool.lend(replace(SHAPE, memory_mib=mib, extra_mib=turn % 2)) as sandbox:
                assert (await sandbox.run(hog)).oom_kills == 1, mib
            async with pool.lend(replace(SHAPE, memory_mib=2 * mib)) as sandbox:
                assert (await sandbox.run(hog)).oom_kills == 0, mib
        assert len(maker.made) == 2
    finally:
        await pool.close()


async def test_a_job_whose_memory_limit_is_below_what_is_in_use_gets_another_sandbox(maker: Maker) -> None:
    pool, roomy = Pool(maker, slots=1, max_uses=100, spare=0), replace(SHAPE, memory_mib=512, disk_mib=256)
    try:
        await pool.warm(roomy)
        engine, (full,) = maker.engine, maker.made
        fill = ["dd", "if=/dev/zero", "of=/box/x", "bs=1M", "count=200"]
        exec_id, stream = await engine.call(engine.begin, full.id, fill, [], "0")
        async with asyncio.timeout(PATIENCE):
            while await engine.call(engine.exit_code, exec_id) is None:
                await asyncio.sleep(0.05)
        stream.close()
        async with pool.lend(replace(roomy, memory_mib=64)) as sandbox:
            assert sandbox is not full
            assert (await sandbox.run(python("print(1)"))).stdout == b"1\n"
        assert pool.counts["destroyed: limits not set"] == 1
        assert not full.alive
    finally:
        await pool.close()
