"""One word for what a program did, and one for how far its job has come."""

from enum import StrEnum


class Verdict(StrEnum):
    """What the program did. A verdict is a value: no program, however hostile, makes evalpool raise."""

    PASSED = "passed"
    """Every check ran to its end and agreed; without checks: it ended by itself with exit code 0."""
    WRONG_ANSWER = "wrong_answer"
    """A check ran and disagreed: an assertion failed, or a case's output differs."""
    RUNTIME_ERROR = "runtime_error"
    """An uncaught exception, a non-zero exit code or a signal that no limit explains."""
    COMPILE_ERROR = "compile_error"
    """A syntax error, or a compiler that refused the program."""
    TIME_LIMIT = "time_limit"
    """The CPU limit was reached, or the wall limit behind it."""
    MEMORY_LIMIT = "memory_limit"
    """The kernel ended it for memory, or an allocation failed at the limit."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than `output_bytes` to one of its streams."""
    EARLY_EXIT = "early_exit"
    """It ended, with whatever exit code, before its check had run to the end."""
    CANCELLED = "cancelled"
    """The caller stopped it. Not scored."""
    SANDBOX_ERROR = "sandbox_error"
    """Our own failure, after all retries. Not scored."""

    @property
    def scored(self) -> bool:
        """Whether the verdict says anything about the program, and so counts in pass@k."""
        return self not in (Verdict.CANCELLED, Verdict.SANDBOX_ERROR)


class State(StrEnum):
    """How far a job has come."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether the job will never run again."""
        return self in (State.FINISHED, State.CANCELLED)


class Priority(StrEnum):
    """Which queue a job waits in; a higher one is served first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"
