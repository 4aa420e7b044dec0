"""The errors of evalpool. What a *program* did is never an error: it is a verdict.

EvalpoolError
├── InvalidJob (ValueError)
│   └── NotAJob
├── InvalidConfig (ValueError)
├── InvalidCall (ValueError)
├── IdempotencyConflict (ValueError)
├── NotFound (LookupError)
│   ├── JobNotFound
│   └── BatchNotFound
├── QueueUnavailable
├── DatabaseUnavailable
├── SchemaMismatch
├── SetupError
│   ├── ImageMissing
│   └── ImageBuildFailed (RuntimeError)
│       ├── NoSuchRecipe
│       └── InvalidAddition
├── SandboxLost
│   ├── NoSandbox
│   ├── NoAgent
│   ├── CannotImport
│   └── SandboxKilled
├── PoolClosed
└── CheckerFailed

The caller can act on the errors down to `SetupError`; evalpool itself handles the ones below it. The sentence of each
class names the remedy.
"""

# ruff: noqa: N818 - most names are the public contract, and say what happened


class EvalpoolError(Exception):
    """The root of these errors; catch it to catch all of them."""

    def __reduce__(self) -> tuple[object, ...]:
        # Python would call the class with the finished message, and not with what the message was made of. An error
        # that cannot be unpickled breaks the process pool in which it was raised.
        return _restored, (type(self), self.args, self.__dict__)


class InvalidJob(EvalpoolError, ValueError):
    """The input is not a valid job, and nothing was stored: correct the field that the message names, in the file and
    line that it names."""


class NotAJob(InvalidJob):
    """The value is neither a `JobSpec` nor a mapping of its fields: pass one of the two."""


class InvalidConfig(EvalpoolError, ValueError):
    """The configuration of a sandbox or of a manager is not valid: correct the field that the message names."""


class InvalidCall(EvalpoolError, ValueError):
    """A sandbox, a manager or a registry cannot do what the call asks for: correct the argument that the message names,
    or do first what it says."""


class IdempotencyConflict(EvalpoolError, ValueError):
    """The idempotency key was used before for different jobs, and nothing was stored: choose another key."""

    def __init__(self, key: str, batch_id: str, difference: str) -> None:
        self.batch_id = batch_id
        super().__init__(f"idempotency_key: {key!r} belongs to batch {batch_id}, whose jobs differ: {difference}")


class NotFound(EvalpoolError, LookupError):
    """The database does not have the row: check the id, and which database is configured."""


class JobNotFound(NotFound):
    """The database has no job with this id: check the id, and which database is configured."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r} in this database; check the id, and EVALPOOL_DATABASE_URL")


class BatchNotFound(NotFound):
    """The database has no batch with this id: check the id, and which database is configured."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"there is no batch {batch_id!r} in this database; check the id, and EVALPOOL_DATABASE_URL")


class QueueUnavailable(EvalpoolError):
    """The batch is stored, but Redis could not be reached to wake a worker: do not submit again, since a worker finds
    the batch at its next poll."""

    def __init__(self, batch_id: str, cause: str) -> None:
        self.batch_id = batch_id
        super().__init__(
            f"batch {batch_id} is stored, but no worker could be woken ({cause}); "
            "a running worker finds it within seconds, so it need not be submitted again"
        )


class DatabaseUnavailable(EvalpoolError):
    """The database failed or does not answer: try again when it does; everything that was committed is safe."""


class SchemaMismatch(EvalpoolError):
    """The database belongs to another version of evalpool: upgrade the database or evalpool, as the message says."""


class SetupError(EvalpoolError):
    """The machine or its configuration lacks something that evalpool needs: do what the end of the message says."""


class ImageMissing(SetupError):
    """The Docker engine does not have the image: build or pull it."""


class ImageBuildFailed(SetupError, RuntimeError):
    """The image could not be built: do what the end of the message says, and build it again."""


class NoSuchRecipe(ImageBuildFailed):
    """There is no recipe or toolchain of this name: choose one of those that the message lists."""


class InvalidAddition(ImageBuildFailed):
    """What is to be added to an image is invalid or cannot be had: correct what the message names."""


class SandboxLost(EvalpoolError):
    """A sandbox broke or violated its protocol, which is our failure and not the program's: the job is retried in
    another sandbox."""


class NoSandbox(SandboxLost):
    """The engine cannot make sandboxes, so no job was tried: jobs go back to the queue until the engine works again."""


class NoAgent(SandboxLost):
    """The image lacks the program that starts the agent: its jobs run through `docker exec`, or need another image."""


class CannotImport(SandboxLost):
    """A module that should be imported in advance cannot be imported in the image: the sandbox is started without
    it."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"{module} cannot be imported in advance {reason}")
        self.module, self.reason = module, reason


class SandboxKilled(SandboxLost):
    """A sandbox died by itself while a program ran in it: the job is retried in a fresh one, and if that dies too, the
    program is to blame."""


class PoolClosed(EvalpoolError):
    """The pool of this worker is closing and lends no more sandboxes: the job goes back to the queue."""


class CheckerFailed(EvalpoolError):
    """The checker of a job neither accepted nor rejected, which is a failure of the benchmark and not of the program:
    the job ends as `sandbox_error`, and its author has to correct the checker."""


def _restored(kind: type[EvalpoolError], args: tuple[object, ...], state: dict[str, object]) -> EvalpoolError:
    """Return an error as it was before it was pickled."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
