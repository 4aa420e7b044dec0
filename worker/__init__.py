"""The worker leases jobs, runs them in warm sandboxes and records the results. `celery -A worker worker` starts one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evalpool.worker.queue.celery import app

__all__ = ["app"]

if __name__ == "worker":
    from evalpool.doors import open_door

    open_door(__name__)


def __getattr__(name: str) -> object:
    """Load the Celery app when `celery -A worker` asks for it. Nothing else in this package needs Celery."""
    if name != "app":
        raise AttributeError(f"module 'evalpool.worker' has no attribute {name!r}")
    from evalpool.worker.queue import control as control  # both sides of `celery inspect` need the command
    from evalpool.worker.queue.celery import app

    return app
