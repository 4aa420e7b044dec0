"""Measures in the suite's worker, `celery -A tests.hostile.monitor worker`, how long its event loop is held up.

A loop is held up by its own callbacks, or by another thread that keeps the interpreter lock: either way by the work of
one thread. A slow machine makes a loop late as well, and no program is to blame for that. So the time that the loop's
thread waited for a CPU is deducted from the lateness of a tick, and the rest counts as far as one thread used the CPU
meanwhile. On a busy machine the monitor sees less of what other threads do, since a thread that waits for the lock
tries every few milliseconds, and waits for a CPU each time; but it never sees more.
"""

import asyncio
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from celery import signals

from evalpool.worker import app as app  # what Celery looks for in this module
from evalpool.worker.queue import lifecycle

HOLDS = "HOSTILE_HOLDS"
"""The environment variable with the path of the file that lists the holds."""
TICK = 0.02
"""Seconds between two looks."""
WORTH_TELLING = 0.03
"""Seconds. Shorter holds are not noted."""


class Monitor:
    """Ticks on a loop, and appends the length of each hold, in seconds, to a file."""

    def __init__(self, loop: asyncio.AbstractEventLoop, file: Path) -> None:
        self._loop, self._file = loop, file
        self._due, self._before = float("inf"), _threads()

    def tick(self) -> None:
        """Note how late this tick is, as far as a thread ran instead."""
        now, threads = time.monotonic(), _threads()
        ran, waited = (
            {thread: times[n] - self._before.get(thread, (0, 0))[n] for thread, times in threads.items()}
            for n in range(2)
        )
        held = min(now - self._due - waited[threading.get_native_id()], max(ran.values()))
        if held > WORTH_TELLING:
            with self._file.open("a") as file:
                file.write(f"{held:.3f}\n")
        self._due, self._before = time.monotonic() + TICK, threads
        self._loop.call_later(TICK, self.tick)


def _threads() -> dict[int, tuple[float, float]]:
    """Return for how many seconds each thread of this process ran, and for how many it was ready to run but had no
    CPU."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            ran, waited, _ = (thread / "schedstat").read_bytes().split()
            found[int(thread.name)] = int(ran) / 1e9, int(waited) / 1e9
    return found


@signals.worker_ready.connect
def _watch(**_: Any) -> None:
    loop = lifecycle.runner()._loop
    loop.call_soon_threadsafe(Monitor(loop, Path(os.environ[HOLDS])).tick)
