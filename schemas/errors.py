"""Everything evalpool raises. What a *program* did is never among it: that is a verdict.

EvalpoolError
├── InvalidJob (ValueError)        the caller's input; names the field, and file and line where there is one
├── IdempotencyConflict (ValueError)   this key was used for different jobs
├── NotFound (LookupError)
│   ├── JobNotFound
│   └── BatchNotFound
├── QueueUnavailable               Redis does not answer; the rows are safe, and a worker finds them later
├── SchemaMismatch                 the database was made by another version of evalpool
├── SetupError                     this machine lacks something; the message says what to do
└── SandboxLost                    our sandbox failed, not the program in it; the job is retried
    ├── NoSandbox                  none can be made at all: nothing was tried
    └── SandboxKilled              it died by itself while a program ran in it
"""


class EvalpoolError(Exception):
    """Root of every error of ours."""


class InvalidJob(EvalpoolError, ValueError):  # noqa: N818 - the names are the public contract
    """The input cannot be a job. Nothing was written."""


class IdempotencyConflict(EvalpoolError, ValueError):  # noqa: N818
    """The same idempotency key was used before for different jobs. Nothing was written."""

    def __init__(self, key: str, batch_id: str, difference: str) -> None:
        self.batch_id = batch_id
        super().__init__(f"idempotency_key: {key!r} belongs to batch {batch_id}, whose jobs differ: {difference}")


class NotFound(EvalpoolError, LookupError):  # noqa: N818
    """No such row."""


class JobNotFound(NotFound):
    """No job has this id in the configured database."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"no job {job_id!r} in this database; EVALPOOL_DATABASE_URL says which one is read")


class BatchNotFound(NotFound):
    """No batch has this id in the configured database."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"no batch {batch_id!r} in this database; EVALPOOL_DATABASE_URL says which one is read")


class QueueUnavailable(EvalpoolError):  # noqa: N818
    """The rows are committed, but Redis could not be reached to wake a worker. A worker finds them at its next poll."""

    def __init__(self, batch_id: str, cause: str) -> None:
        self.batch_id = batch_id
        super().__init__(
            f"batch {batch_id} is stored, but no worker could be woken ({cause}); "
            "a running worker finds it within seconds, so it need not be submitted again"
        )


class SchemaMismatch(EvalpoolError):  # noqa: N818
    """The database's schema is not one this version knows."""


class SetupError(EvalpoolError):
    """This machine lacks something evalpool needs. The message ends with the remedy."""


class SandboxLost(EvalpoolError):  # noqa: N818
    """A sandbox broke, or said something it must not. Never the verdict of a program by itself."""


class NoSandbox(SandboxLost):
    """No sandbox can be made: the engine is away, or broken. No job is to blame, and none was tried."""


class CheckerFailed(EvalpoolError):  # noqa: N818
    """A job's checker neither accepted nor rejected: a failure of the benchmark, not of the program."""


class SandboxKilled(SandboxLost):
    """A sandbox ended by itself while a program ran in it: by the program's doing, if it happens again."""
