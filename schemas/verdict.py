"""The words for a job: its verdict, its state and its priority."""

from enum import StrEnum


class Verdict(StrEnum):
    """What the program did. It is returned, not raised: no program, however hostile, makes evalpool raise."""

    PASSED = "passed"
    """Every check ran to its end and accepted the program; without checks, the program ended by itself with exit code
    0."""
    WRONG_ANSWER = "wrong_answer"
    """A check ran and rejected the program: an assertion failed, or the output of a case differs."""
    RUNTIME_ERROR = "runtime_error"
    """The program ended with an uncaught exception, a non-zero exit code or a signal that no limit explains."""
    COMPILE_ERROR = "compile_error"
    """The program has a syntax error, or its compilation failed."""
    TIME_LIMIT = "time_limit"
    """The program reached its CPU limit, or the wall limit behind it."""
    MEMORY_LIMIT = "memory_limit"
    """The kernel killed the program for its memory, or an allocation failed at the limit."""
    OUTPUT_LIMIT = "output_limit"
    """The program wrote more than `output_bytes` to one of its output streams."""
    EARLY_EXIT = "early_exit"
    """The program ended, with whatever exit code, before its check had run to the end."""
    CANCELLED = "cancelled"
    """The caller cancelled the job. This verdict is not scored."""
    SANDBOX_ERROR = "sandbox_error"
    """Evalpool itself failed, after all retries. This verdict is not scored."""

    @property
    def scored(self) -> bool:
        """Whether the verdict says something about the program and counts in pass@k."""
        return self not in (Verdict.CANCELLED, Verdict.SANDBOX_ERROR)


class State(StrEnum):
    """How far a job has come, as its caller sees it."""

    QUEUED = "queued"
    """The job waits for a worker."""
    RUNNING = "running"
    """A worker has claimed the job."""
    FINISHED = "finished"
    """The job has its result."""
    CANCELLED = "cancelled"
    """The job or its batch was cancelled."""

    @classmethod
    def of(cls, stored: str) -> "State":
        """The state that a caller sees if the job's row has this state."""
        return cls.QUEUED if stored in WAITING else cls(stored)

    @property
    def final(self) -> bool:
        """Whether the job has its result and will never run again."""
        return self in FINAL

    @classmethod
    def after(cls, verdict: Verdict) -> "State":
        """The final state of a job with this verdict."""
        return cls.CANCELLED if verdict is Verdict.CANCELLED else cls.FINISHED


TWIN = "twin"
"""In a row: the job waits for the result of an identical one (deduplication)."""
HELD = "held"
"""In a row: the job waits until its batch is stored completely."""
FINAL = (State.FINISHED, State.CANCELLED)
"""The states of jobs that have a result."""
WAITING: tuple[str, ...] = (State.QUEUED, TWIN, HELD)
"""The states of rows whose jobs have no result yet and are not running."""
OPEN = (*WAITING, State.RUNNING)
"""The states of rows whose jobs have no result yet."""


class Priority(StrEnum):
    """The priority of a job; a higher one is served first."""

    HIGH = "high"
    """For jobs that somebody waits for."""
    NORMAL = "normal"
    """For everything else."""
    LOW = "low"
    """For jobs that can wait."""
