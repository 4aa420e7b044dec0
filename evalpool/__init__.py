"""evalpool evaluates programs in sandboxes and returns a verdict for each.

from evalpool import submit_job

print(submit_job(code="print(6 * 7)").result(timeout=60).stdout)
"""

# ruff: noqa: PTH112, PTH118, PTH120 - importing `pathlib` or `typing` would take most of the time of `import evalpool`

from os.path import dirname, isdir, join

if not isdir(join(__path__[0], "api")):
    # A checkout without symbolic links: the folders are beside this one. Everywhere else, they are in it.
    __path__.append(dirname(__path__[0]))

from evalpool.doors import install

install()
del install

TYPE_CHECKING = False
if TYPE_CHECKING:
    from evalpool.api import (
        BatchHandle,
        Job,
        get_batch,
        get_job,
        submit_batch,
        submit_batch_async,
        submit_job,
        submit_job_async,
    )
    from evalpool.schemas import (
        BatchNotFound,
        Case,
        IdempotencyConflict,
        InvalidJob,
        JobNotFound,
        JobSpec,
        Limits,
        QueueUnavailable,
        Result,
        Verdict,
    )

__all__ = [
    "BatchHandle",
    "BatchNotFound",
    "Case",
    "IdempotencyConflict",
    "InvalidJob",
    "Job",
    "JobNotFound",
    "JobSpec",
    "Limits",
    "QueueUnavailable",
    "Result",
    "Verdict",
    "get_batch",
    "get_job",
    "submit_batch",
    "submit_batch_async",
    "submit_job",
    "submit_job_async",
]


def __getattr__(name: str) -> object:
    """Load a public name when it is first used, so that `import evalpool` is quick and needs no settings."""
    if name not in __all__:
        raise AttributeError(f"module 'evalpool' has no attribute {name!r}")
    from importlib import import_module

    home = import_module("evalpool.api")
    value: object = getattr(home if name in home.__all__ else import_module("evalpool.schemas"), name)
    globals()[name] = value
    return value
