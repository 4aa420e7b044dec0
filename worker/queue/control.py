"""The command `celery -A worker inspect sandbox_pool`."""

from typing import Any

from celery.worker.control import inspect_command


@inspect_command()
def sandbox_pool(_state: Any) -> dict[str, Any]:
    """Show the warm sandboxes of each worker, and what became of the others."""
    from evalpool.worker.queue.lifecycle import runner  # only a worker has a runner; the asking side must not load it

    return runner().snapshot()
