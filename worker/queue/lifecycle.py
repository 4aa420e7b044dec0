"""Builds the runner when a Celery worker starts, and drains and closes it when the worker ends."""

import atexit
import ctypes
import gc
import logging
import sys
import warnings
from typing import Any

from celery import bootsteps, signals
from celery.exceptions import SecurityWarning

from evalpool.schemas.errors import EvalpoolError
from evalpool.schemas.settings import settings
from evalpool.worker import logs
from evalpool.worker.queue.celery import app
from evalpool.worker.runner import Runner

log = logging.getLogger("evalpool")

M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3

_runner: Runner | None = None


def runner() -> Runner:
    """The runner of this worker process."""
    if _runner is None:
        raise RuntimeError("no worker runs in this process")
    return _runner


# Celery warns about root because of pickle, which we never accept; and whoever may use Docker is root anyway.
warnings.filterwarnings("ignore", category=SecurityWarning)


@signals.setup_logging.connect
def _log(loglevel: int = logging.INFO, **_: Any) -> None:
    logs.set_up(settings().log_format, loglevel)


@signals.worker_init.connect
def _start(sender: Any, **_: Any) -> None:
    """Start the runner before the first message is taken, as a machine that cannot run jobs must not take any."""
    global _runner
    libc = ctypes.CDLL(None)
    libc.mallopt(M_ARENA_MAX, 2)  # else every thread keeps a heap of its own as large as its largest job
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)  # and what a large output took is given back when it is gone
    configured = settings()
    logs.set_up(configured.log_format, sender.loglevel or logging.INFO)  # Celery does it only after this signal
    log.info("warming %d sandboxes of %s", configured.slots + 1, configured.image, extra={"action": "warming"})
    new = Runner(configured)
    try:
        new.start()
    except EvalpoolError as error:
        log.critical("%s", error, extra={"action": "refused"})
        sys.exit(1)
    _runner = new
    atexit.register(_stop)
    log.info("ready: %d slots", configured.slots, extra={"action": "ready"})


@signals.worker_ready.connect
def _settle(**_: Any) -> None:
    """Exempt the objects that a worker starts with from garbage collection, as they live as long as it does. Each
    search through them would hold up every slot for a tenth of a second."""
    gc.collect()
    gc.freeze()


@signals.worker_shutting_down.connect
def _drain(**_: Any) -> None:
    if _runner is not None:
        _runner.drain()


@app.steps["worker"].add
class _Ending(bootsteps.StartStopStep):  # type: ignore[misc]
    """Celery can end by itself, for example when Redis is full, and sends no signal then. It would wait for its threads
    as long as there are jobs, without receiving messages."""

    requires = ("celery.worker.components:Pool",)  # a step that requires another one is stopped before it

    def stop(self, _worker: Any) -> None:
        if _runner is not None and not _runner.draining:
            _runner.drain()


@signals.worker_shutdown.connect
def _stop(**_: Any) -> None:
    if _runner is not None:
        _runner.close()
