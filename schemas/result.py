"""What came out: the verdict, what the program said, and what it used."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, computed_field

from schemas.job import Scalar
from schemas.verdict import Verdict


class Metrics(BaseModel):
    """What one run used, as the kernel counted it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wall_seconds: float = 0.0
    """From the start of the program to its end."""
    cpu_seconds: float = 0.0
    """User and system time of all its processes."""
    peak_memory_bytes: int = 0
    """Largest memory of all its processes together."""
    oom_killed: bool = False
    """The kernel ended one of its processes for memory."""
    processes_peak: int = 0
    """Most processes and threads seen alive at once."""
    output_bytes: int = 0
    """Both streams together, as written, before any cut."""
    queue_seconds: float = 0.0
    """From submission to the start of the attempt that gave this result."""
    setup_seconds: float = 0.0
    """From the start of the attempt to the start of the program: waiting for a sandbox, mostly."""
    sandbox_uses: int = 0
    """How many jobs this sandbox had run, this one included."""
    limit_share: float = 0.0
    """How much of its tightest limit (CPU time, wall time, memory) it used: 1 is all of it."""
    rerun: bool = False
    """This is its second run: the first reached its wall limit while others used its CPU or its sandbox was paused."""


class CaseResult(BaseModel):
    """One case of a job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    verdict: Verdict
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = ""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    detail: str = ""
    metrics: Metrics = Metrics()


class Result(BaseModel):
    """The one row for one job. Text is valid UTF-8 without NUL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_id: str
    batch_id: str
    task_id: str | int | None = None
    sample_id: str | int | None = None
    labels: dict[str, Scalar] | None = None
    verdict: Verdict
    exit_code: int | None = None
    """Of the program; `None` when a signal ended it or it never ran."""
    signal: int | None = None
    stdout: str = ""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    detail: str = ""
    """One sentence a person can read."""
    cases: tuple[CaseResult, ...] = ()
    metrics: Metrics = Metrics()
    attempt: int = 0
    worker: str | None = None
    sandbox_id: str | None = None
    image_digest: str | None = None
    comparator: str | None = None
    """How outputs were compared: name and version."""
    shared_with: str | None = None
    """The identical job that was run instead of this one."""
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether the verdict is `passed`."""
        return self.verdict is Verdict.PASSED

    @computed_field  # type: ignore[prop-decorator]
    @property
    def deduplicated(self) -> bool:
        """Whether an identical job was run instead of this one."""
        return self.shared_with is not None
