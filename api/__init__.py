"""Submitting jobs, following them, reading what came out.

    from api import submit_job
    result = submit_job(code="print(input())", stdin="hi").result(timeout=60)

The names below are loaded on first use, so that the command line starts quickly.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from api.handles import BatchHandle, Job
    from api.jobs import get_batch, get_job, submit_batch, submit_job

__all__ = ["BatchHandle", "Job", "get_batch", "get_job", "submit_batch", "submit_job"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'api' has no attribute {name!r}")
    from api import jobs

    value: object = getattr(jobs, name)
    return value
