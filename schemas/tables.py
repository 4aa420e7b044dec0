"""The rows. Times are seconds since 1970 by the database's clock, so that leases compare across machines."""

from sqlalchemy import BigInteger, Column, Index, Text, text
from sqlmodel import Field, SQLModel

from schemas.packing import Packed
from schemas.verdict import State, Verdict

_QUEUED, _RUNNING = text("state = 'queued'"), text("state = 'running'")
_TWINS, _DIGESTED = text("state = 'twin'"), text("digest IS NOT NULL")
_UNFINISHED = text("todo IS NOT NULL")

TWIN = "twin"
"""The state of a job that waits for the result of an identical one; to its caller it is queued."""
HELD = "held"
"""The state of a job whose batch is not completely stored yet; to its caller it is queued."""

FILLING, QUEUEING, CANCELLING = "filling", "queueing", "cancelling"
"""What is left to do with a batch: its submitter is storing its jobs, the stored jobs are being queued, or the jobs are
being cancelled. Any worker can finish the last two. A hash of the jobs follows the first word, so that nobody can store
other jobs in the batch."""


class BatchRow(SQLModel, table=True):
    """Jobs submitted together."""

    __tablename__ = "batches"
    __table_args__ = (Index("ix_batches_todo", "todo", sqlite_where=_UNFINISHED, postgresql_where=_UNFINISHED),)

    id: str = Field(primary_key=True)
    name: str | None = None
    idempotency_key: str | None = Field(default=None, unique=True)
    total: int
    about: str | None = Field(default=None, sa_column=Column(Text))
    """How it was made, as JSON, for its report."""
    created_at: float
    cancelled_at: float | None = None
    todo: str | None = None
    """What is left to do with its jobs, where that takes more than one transaction."""
    pins: str | None = Field(default=None, sa_column=Column(Text))
    """Name of an image → digest, as JSON, for images that no worker had at submission. The first claim pins them."""


class JobRow(SQLModel, table=True):
    """One job: what to run, and who is at it."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_batch", "batch_id", "seq", unique=True),
        # For claims and for expired leases, whose cost must not grow with the number of other jobs. The image is in the
        # index so that SQLite can skip jobs that the worker cannot run without reading their rows.
        Index("ix_jobs_queue", "priority", "rank", "image", sqlite_where=_QUEUED, postgresql_where=_QUEUED),
        Index("ix_jobs_running", "lease_until", sqlite_where=_RUNNING, postgresql_where=_RUNNING),
        # How many of a batch are under way: without it, SQLite reads the whole batch.
        Index("ix_jobs_under_way", "batch_id", sqlite_where=_RUNNING, postgresql_where=_RUNNING),
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
    image: str | None = None
    """The image it runs in, in the form of `schemas.images`; NULL in rows of older versions."""
    priority: str
    rank: float
    """Its turn: the lower goes first. See `rows.rank`."""
    state: str = State.QUEUED
    attempt: int = 0
    """How many times a worker has claimed it."""
    worker: str | None = None
    """While it runs: the worker that runs it. While it waits: the worker that leaves it to others until `lease_until`,
    or the version of evalpool that cannot read it."""
    lease_until: float | None = None
    """While it runs: when its lease expires. While it waits: see `worker`."""
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


class WorkerRow(SQLModel, table=True):
    """The heartbeat of a worker, with what it reports about itself."""

    __tablename__ = "workers"

    name: str = Field(primary_key=True)
    seen_at: float
    about: str = Field(sa_type=Text)
    """A `schemas.fleet.Member` as JSON."""


class ClockRow(SQLModel, table=True):
    """Used only with SQLite, one row for each boot: the offset from the seconds since boot to the time of day. Unlike a
    wall clock, this sum never jumps, and all processes of the machine share it."""

    __tablename__ = "clocks"

    id: int = Field(primary_key=True)
    boot_id: str
    start: float


class Ran(SQLModel):
    """What a run of a program leaves behind: the common part of results and cases."""

    verdict: str
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = Field(default="", sa_type=Packed)
    stderr: str = Field(default="", sa_type=Packed)
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
    decisive: int | None = None
    """The index of the case with the same output as the result. The output is stored only in the row of that case."""
    size: int | None = None
    """Characters of all its outputs, its cases included, so that readers can fetch a bounded part at a time."""
    started_at: float | None = None
    finished_at: float


class CaseRow(Ran, table=True):
    """The result of one case of a job."""

    __tablename__ = "cases"

    job_id: str = Field(primary_key=True, foreign_key="jobs.id")
    index: int = Field(primary_key=True)


class TallyRow(SQLModel, table=True):
    """How many results of a batch have a verdict. Each writer has rows of its own, so that writers do not wait for each
    other. The sum over all writers is the count."""

    __tablename__ = "tallies"

    batch_id: str = Field(primary_key=True, foreign_key="batches.id")
    verdict: str = Field(primary_key=True)
    writer: str = Field(primary_key=True)
    count: int


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
