"""The rows. Times are seconds since 1970 by the database's clock, so that leases compare across machines."""

from sqlalchemy import BigInteger, Column, Index, Text, text
from sqlmodel import Field, SQLModel

from schemas.verdict import State, Verdict

_QUEUED, _RUNNING = text("state = 'queued'"), text("state = 'running'")
_TWINS, _DIGESTED = text("state = 'twin'"), text("digest IS NOT NULL")
_UNANNOUNCED = text("state = 'queued' AND published_at IS NULL")


TWIN = "twin"
"""The state of a job that waits for the result of an identical one; to its caller it is queued."""


class BatchRow(SQLModel, table=True):
    """Jobs submitted together."""

    __tablename__ = "batches"

    id: str = Field(primary_key=True)
    name: str | None = None
    idempotency_key: str | None = Field(default=None, unique=True)
    total: int
    about: str | None = Field(default=None, sa_column=Column(Text))
    """How it was made, as JSON, for its report."""
    created_at: float
    cancelled_at: float | None = None


class JobRow(SQLModel, table=True):
    """One job: what to run, and who is at it."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_batch", "batch_id", "seq", unique=True),
        # Who is next, who has fallen silent, who was never announced: cheap whatever the number of other jobs.
        Index("ix_jobs_queue", "priority", "rank", sqlite_where=_QUEUED, postgresql_where=_QUEUED),
        Index("ix_jobs_running", "lease_until", sqlite_where=_RUNNING, postgresql_where=_RUNNING),
        Index("ix_jobs_unannounced", "id", sqlite_where=_UNANNOUNCED, postgresql_where=_UNANNOUNCED),
        Index("ix_jobs_twins", "twin_of", sqlite_where=_TWINS, postgresql_where=_TWINS),
        Index("ix_jobs_digest", "digest", sqlite_where=_DIGESTED, postgresql_where=_DIGESTED),
    )

    id: str = Field(primary_key=True)
    batch_id: str = Field(foreign_key="batches.id")
    seq: int
    """Place in the batch, from 0."""
    spec: str = Field(sa_column=Column(Text, nullable=False))
    """The JobSpec as JSON, defaults left out."""
    task_id: str | None = None
    """As JSON, so that 7 and "7" stay apart; so is sample_id."""
    sample_id: str | None = None
    labels: str | None = Field(default=None, sa_column=Column(Text))
    priority: str
    rank: float
    """Its turn: the lower goes first. See `rows.job_row`."""
    state: str = State.QUEUED
    attempt: int = 0
    """How many times a worker has claimed it."""
    worker: str | None = None
    lease_until: float | None = None
    """While it runs: when its worker counts as dead. While it waits: until when the worker that failed with it leaves
    it to others."""
    published_at: float | None = None
    """When Redis was last told of it; NULL: it has not been."""
    created_at: float
    started_at: float | None = None
    """Start of the latest attempt."""
    cancelled_at: float | None = None
    """When its caller asked for its end."""
    failures: str | None = Field(default=None, sa_column=Column(Text))
    """What went wrong with us in each failed attempt, a line each."""
    digest: str | None = None
    """Of all that decides its result; NULL where its result is nobody else's."""
    twin_of: str | None = None
    """The identical job whose result it gets."""


class TurnRow(SQLModel, table=True):
    """One row: how far the turns have come. New batches start there, so that none waits behind all of an older one."""

    __tablename__ = "turns"

    id: int = Field(primary_key=True)
    value: float


class Ran(SQLModel):
    """What a run of a program leaves behind: the common part of results and cases."""

    verdict: str
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = Field(default="", sa_type=Text)
    stderr: str = Field(default="", sa_type=Text)
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    detail: str = Field(default="", sa_type=Text)
    wall_seconds: float = 0
    cpu_seconds: float = 0
    peak_memory_bytes: int = Field(default=0, sa_type=BigInteger)
    oom_killed: bool = False
    processes_peak: int = 0
    output_bytes: int = Field(default=0, sa_type=BigInteger)
    queue_seconds: float = 0
    setup_seconds: float = 0
    sandbox_uses: int = 0
    limit_share: float = 0
    rerun: bool = False


class ResultRow(Ran, table=True):
    """The result of a job. Its primary key is what makes a second one impossible."""

    __tablename__ = "results"
    __table_args__ = (Index("ix_results_batch", "batch_id", "verdict"),)

    job_id: str = Field(primary_key=True, foreign_key="jobs.id")
    batch_id: str = Field(foreign_key="batches.id")
    attempt: int = 0
    worker: str | None = None
    sandbox_id: str | None = None
    image_digest: str | None = None
    comparator: str | None = None
    shared_with: str | None = None
    """The job that was run instead of this one."""
    started_at: float | None = None
    finished_at: float


class CaseRow(Ran, table=True):
    """The result of one case of a job."""

    __tablename__ = "cases"

    job_id: str = Field(primary_key=True, foreign_key="jobs.id")
    index: int = Field(primary_key=True)


class LetterRow(SQLModel, table=True):
    """A message that nobody could read."""

    __tablename__ = "letters"

    id: int | None = Field(default=None, primary_key=True)
    worker: str
    reason: str = Field(sa_type=Text)
    body: str = Field(sa_type=Text)
    """Its beginning."""
    arrived_at: float


FINAL_STATE = {verdict: State.CANCELLED if verdict is Verdict.CANCELLED else State.FINISHED for verdict in Verdict}
"""The state that a verdict puts its job in."""
