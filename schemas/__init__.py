"""The values that evalpool speaks about (jobs, limits, verdicts, results), its settings and errors, and the database.
This package imports nothing else of evalpool."""

if __name__ == "schemas":
    from evalpool.doors import open_door

    open_door(__name__)

from evalpool.schemas.batch import Batch, Progress
from evalpool.schemas.errors import (
    BatchNotFound,
    DatabaseUnavailable,
    EvalpoolError,
    IdempotencyConflict,
    InvalidJob,
    JobNotFound,
    QueueUnavailable,
    SandboxLost,
    SchemaMismatch,
    SetupError,
)
from evalpool.schemas.job import Case, JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.report import Report
from evalpool.schemas.result import CaseResult, Metrics, Result
from evalpool.schemas.settings import Settings
from evalpool.schemas.verdict import Priority, State, Verdict

__all__ = [
    "Batch",
    "BatchNotFound",
    "Case",
    "CaseResult",
    "DatabaseUnavailable",
    "EvalpoolError",
    "IdempotencyConflict",
    "InvalidJob",
    "JobNotFound",
    "JobSpec",
    "Limits",
    "Metrics",
    "Priority",
    "Progress",
    "QueueUnavailable",
    "Report",
    "Result",
    "SandboxLost",
    "SchemaMismatch",
    "Settings",
    "SetupError",
    "State",
    "Verdict",
]
