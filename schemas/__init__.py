"""The words of evalpool, then its rows. Imports nothing of ours."""

from schemas.batch import Batch, Progress
from schemas.errors import (
    BatchNotFound,
    EvalpoolError,
    IdempotencyConflict,
    InvalidJob,
    JobNotFound,
    QueueUnavailable,
    SandboxLost,
    SchemaMismatch,
    SetupError,
)
from schemas.job import Case, JobSpec
from schemas.limits import Limits
from schemas.report import Report
from schemas.result import CaseResult, Metrics, Result
from schemas.settings import Settings
from schemas.verdict import Priority, State, Verdict

__all__ = [
    "Batch",
    "BatchNotFound",
    "Case",
    "CaseResult",
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
