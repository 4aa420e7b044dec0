"""The monitor must see whatever holds up an event loop, and nothing else."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from tests.hostile.monitor import Monitor

BACKTRACKS = re.compile(r"(?:[0-9]+\.?[0-9]*)x")
"""Takes quadratic time, in a single call that keeps the interpreter lock."""


def _burn(seconds: float) -> None:
    size, took = 1000, 0.0
    while took < seconds:  # until one call takes that long on this machine
        size, before = 2 * size, time.thread_time()
        BACKTRACKS.fullmatch("1" * size)
        took = time.thread_time() - before


async def _longest(file: Path, work: Callable[[], Awaitable[None]]) -> float:
    Monitor(asyncio.get_running_loop(), file).tick()
    await asyncio.sleep(0.1)
    await work()
    await asyncio.sleep(0.1)
    return max(map(float, file.read_text().split()), default=0) if file.exists() else 0


async def test_a_callback_that_holds_up_the_loop_is_seen(tmp_path: Path) -> None:
    async def work() -> None:
        _burn(0.3)

    assert await _longest(tmp_path / "holds", work) > 0.1


async def test_a_thread_that_keeps_the_interpreter_lock_is_seen(tmp_path: Path) -> None:
    for seconds in (0.3, 1, 3, 10):  # the busier the machine is, the less the monitor sees
        if await _longest(tmp_path / "holds", partial(asyncio.to_thread, _burn, seconds)) > 0.1:
            return
    pytest.fail("the monitor did not see that the loop was held up for ten seconds")


async def test_a_loop_that_got_no_cpu_does_not_count_as_held_up(tmp_path: Path) -> None:
    async def work() -> None:
        time.sleep(0.5)  # as if the machine had stopped

    assert await _longest(tmp_path / "holds", work) < 0.1
