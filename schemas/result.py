"""The result of a job: its verdict, its output, and what it used."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, computed_field, model_validator

from evalpool.schemas.job import Scalar
from evalpool.schemas.verdict import Verdict


class Metrics(BaseModel):
    """What one run of a program used, as the kernel counted it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wall_seconds: float = 0.0
    """Seconds from the start of the program to its end."""
    cpu_seconds: float = 0.0
    """User and system time of all processes."""
    peak_memory_bytes: int = 0
    """The largest memory of all processes together."""
    oom_killed: bool = False
    """Whether the kernel killed one of the processes for its memory."""
    processes_peak: int = 0
    """The largest number of processes and threads that were seen alive at the same time."""
    output_bytes: int = 0
    """Bytes that were written to both output streams together, before truncation."""
    queue_seconds: float = 0.0
    """Seconds from the submission to the start of the attempt that gave this result."""
    setup_seconds: float = 0.0
    """Seconds from the start of the attempt to the start of the program, mostly spent waiting for a sandbox."""
    sandbox_uses: int = 0
    """How many jobs the sandbox had run, this one included."""
    limit_share: float = 0.0
    """The share that was used of the tightest limit (CPU time, wall time or memory); 1 is all of it."""
    rerun: bool = False
    """Whether this is the second run. The first one reached its wall limit while other processes used its CPU or its
    sandbox was paused."""


class CaseResult(BaseModel):
    """The result of one case of a job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    """The place of the case in the job, from 0."""
    verdict: Verdict
    """The verdict on this case alone."""
    exit_code: int | None = None
    """The exit code of this run; `None` if a signal ended it."""
    signal: int | None = None
    """The signal that ended this run."""
    stdout: str = ""
    """What this run wrote to standard output. Only the first cases keep the whole text."""
    stderr: str = ""
    """What this run wrote to standard error."""
    stdout_truncated: bool = False
    """Whether the end of standard output is missing."""
    stderr_truncated: bool = False
    """Whether the end of standard error is missing."""
    detail: str = ""
    """One sentence for people that explains the verdict."""
    metrics: Metrics = Metrics()
    """What this run used."""


class Result(BaseModel):
    """The result of one job. Texts are valid UTF-8 without NUL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_id: str
    """The id of the job."""
    batch_id: str
    """The id of its batch."""
    task_id: str | int | None = None
    """The task that the job named."""
    sample_id: str | int | None = None
    """The sample that the job named."""
    labels: dict[str, Scalar] | None = None
    """The labels of the job."""
    verdict: Verdict
    """One word for what the program did."""
    exit_code: int | None = None
    """The exit code of the program; `None` if a signal ended the program, or if it never ran."""
    signal: int | None = None
    """The signal that ended the program."""
    stdout: str = ""
    """What the program wrote to standard output, in the decisive case if there are cases."""
    stderr: str = ""
    """What the program wrote to standard error, likewise."""
    stdout_truncated: bool = False
    """Whether the end of standard output is missing."""
    stderr_truncated: bool = False
    """Whether the end of standard error is missing."""
    detail: str = ""
    """One sentence for people that explains the verdict."""
    cases: tuple[CaseResult, ...] = ()
    """The result of each case that was run."""
    metrics: Metrics = Metrics()
    """What the program used, in all cases together."""
    attempt: int = 0
    """Which attempt gave this result, from 1; 0 if the job was never tried."""
    worker: str | None = None
    """The name of the worker that ran the job."""
    sandbox_id: str | None = None
    """The id of the container that ran it."""
    image_digest: str | None = None
    """The digest of the image that it ran in."""
    comparator: str | None = None
    """How outputs were compared: the name and version of the comparator."""
    shared_with: str | None = None
    """The identical job that was run instead of this one."""
    created_at: datetime
    """When the job was submitted."""
    started_at: datetime | None = None
    """When the attempt began that gave this result."""
    finished_at: datetime
    """When the result was made."""

    @model_validator(mode="before")
    @classmethod
    def _without_computed(cls, given: Any) -> Any:
        """Accept a result as it was written, for example as a line of `results.jsonl`."""
        computed = cls.model_computed_fields.keys()
        if not isinstance(given, dict) or computed.isdisjoint(given):
            return given
        return {name: value for name, value in given.items() if name not in computed}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def index(self) -> int:
        """The place of the job in its batch, from 0, in the order of submission."""
        return int(self.job_id.rpartition("-")[2])  # the end of every id, see `rows.job_id`

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
