"""Modules that the warm interpreter imports in advance."""

import logging
from dataclasses import replace

import pytest

from evalpool.schemas.settings import Settings
from evalpool.worker.sandbox.base import Program
from evalpool.worker.sandbox.engine import Engine
from evalpool.worker.sandbox.factory import Containers
from tests.sandbox.conftest import SHAPE


def python(code: str) -> Program:
    return Program(code=code.encode(), main="main.py")


async def test_modules_that_an_image_lacks_are_not_imported_there_in_advance(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = ("nowhere", "numpy", "asyncio.windows_events", "decimal")
    containers = Containers(engine, Settings(preload=wanted))
    code = f"import sys; print([name for name in {wanted!r} if name in sys.modules])"
    with caplog.at_level(logging.WARNING, "evalpool.sandbox"):
        for _ in range(2):
            box = await containers.start(replace(SHAPE, memory_mib=256))
            try:
                outcome = await box.run(python(code))
            finally:
                await box.close()
            assert outcome.stdout == b"['numpy', 'decimal']\n", outcome.stderr
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "nowhere cannot be imported in the image evalpool/python",
        "asyncio.windows_events cannot be imported in the image evalpool/python",
    ]
