"""Submits jobs, follows them, and reads their results.

    from evalpool.api import submit_job
    result = submit_job(code="print(input())", stdin="hi").result(timeout=60)

The names below are loaded on first use, so that the command line starts quickly.
"""

if __name__ == "api":
    from evalpool.doors import open_door

    open_door(__name__)

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evalpool.api.handles import BatchHandle, Job
    from evalpool.api.jobs import get_batch, get_job, submit_batch, submit_batch_async, submit_job, submit_job_async

__all__ = [
    "BatchHandle",
    "Job",
    "get_batch",
    "get_job",
    "submit_batch",
    "submit_batch_async",
    "submit_job",
    "submit_job_async",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'evalpool.api' has no attribute {name!r}")
    from evalpool.api import jobs

    value: object = getattr(jobs, name)
    return value
