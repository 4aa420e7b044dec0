"""The worker: leases jobs, runs them in warm sandboxes, records what came out. `celery -A worker worker` starts one."""

from worker import control as control  # registers the inspect command where it is asked as well as where it is answered
from worker.celery import app

__all__ = ["app"]
