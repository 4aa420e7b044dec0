"""The worker: leases jobs, runs them in warm sandboxes, records what came out. `celery -A worker worker` starts one."""

from worker.celery import app

__all__ = ["app"]
