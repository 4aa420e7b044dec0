"""The tables. Times are seconds since 1970 by the database's clock, so that leases compare across machines."""

from enum import StrEnum

from sqlalchemy import BigInteger, Column, ColumnElement, Index, Text, and_, text
from sqlmodel import Field, SQLModel

from evalpool.schemas.packing import Packed
from evalpool.schemas.verdict import TWIN, State

_QUEUED, _RUNNING = text(f"state = '{State.QUEUED}'"), text(f"state = '{State.RUNNING}'")
_TWINS, _DIGESTED = text(f"state = '{TWIN}'"), text("digest IS NOT NULL")
_UNFINISHED = text("todo IS NOT NULL")


class Todo(StrEnum):
    """What is left to do with a batch. Any worker can finish the last two."""

    FILLING = "filling"
    """The submitter is storing the jobs. In the row, a hash of the jobs follows this word, so that nobody can store
    other jobs in the batch."""
    QUEUEING = "queueing"
    """The stored jobs are being queued."""
    CANCELLING = "cancelling"
    """The jobs are being cancelled."""


class BatchRow(SQLModel, table=True):
    """Jobs submitted together."""

    __tablename__ = "batches"
    __table_args__ = (Index("ix_batches_todo", "todo", sqlite_where=_UNFINISHED, postgresql_where=_UNFINISHED),)

    id: str = Field(primary_key=True)
    name: str | None = None
    idempotency_key: str | None = Field(default=None, unique=True)
    total: int
    about: str | None = Field(default=None, sa_column=Column(Text))
    """How the batch was made, as JSON, for its report."""
    created_at: float
    cancelled_at: float | None = None
    todo: str | None = None
    """What is left to do with the jobs, if that takes more than one transaction; see `Todo`."""
    pins: str | None = Field(default=None, sa_column=Column(Text))
    """Name of an image → digest, as JSON, for images that no worker had at submission. The first claim pins them."""


class JobRow(SQLModel, table=True):
    """One job: what to run, and which worker runs it."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_batch", "batch_id", "seq", unique=True),
        # For claims and for expired leases, whose cost must not grow with the number of other jobs. The image is in the
        # index so that SQLite can skip jobs that the worker cannot run without reading their rows.
        Index("ix_jobs_queue", "fleet", "priority", "rank", "image", sqlite_where=_QUEUED, postgresql_where=_QUEUED),
        Index("ix_jobs_running", "lease_until", sqlite_where=_RUNNING, postgresql_where=_RUNNING),
        # For the number of running jobs of a batch: without this index, SQLite reads the whole batch.
        Index("ix_jobs_under_way", "batch_id", sqlite_where=_RUNNING, postgresql_where=_RUNNING),
        Index("ix_jobs_twins", "twin_of", sqlite_where=_TWINS, postgresql_where=_TWINS),
        Index("ix_jobs_digest", "digest", sqlite_where=_DIGESTED, postgresql_where=_DIGESTED),
    )

    id: str = Field(primary_key=True)
    batch_id: str = Field(foreign_key="batches.id")
    seq: int
    """The place in the batch, from 0."""
    spec: str = Field(sa_column=Column(Text, nullable=False))
    """The `JobSpec` as JSON, without fields that have their default."""
    task_id: str | None = None
    """The task id as JSON, so that 7 and "7" stay apart; the same holds for `sample_id`."""
    sample_id: str | None = None
    labels: str | None = Field(default=None, sa_column=Column(Text))
    image: str | None = None
    """The image of the job, in the form of `schemas.images`; NULL in rows of older versions."""
    fleet: str = Field(default="", sa_column_kwargs={"server_default": ""})
    """The name of the fleet whose workers may claim the job, which is empty unless `EVALPOOL_FLEET` was set."""
    priority: str
    rank: float
    """The turn of the job (fair share). The lowest goes first; see `rows.rank`."""
    state: str = State.QUEUED
    attempt: int = 0
    """How many times a worker has claimed the job."""
    worker: str | None = None
    """While the job runs: its worker. While it waits: the worker that leaves it to others until `lease_until`, or the
    version of evalpool that cannot read it."""
    lease_until: float | None = None
    """While the job runs: when its lease expires. While it waits: see `worker`."""
    created_at: float
    started_at: float | None = None
    """The start of the latest attempt."""
    cancelled_at: float | None = None
    """When the caller cancelled the job."""
    failures: str | None = Field(default=None, sa_column=Column(Text))
    """What went wrong with evalpool in each failed attempt, a line each."""
    digest: str | None = None
    """The digest of everything that decides the result; NULL if the result is not shared."""
    twin_of: str | None = None
    """The leader: the identical job whose result this job gets."""


class TurnRow(SQLModel, table=True):
    """A table with one row: the current turn (fair share). A new batch starts there, so that it does not wait behind
    all jobs of an older one."""

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
    """The clock of SQLite, a row for each boot: the offset from the seconds since boot to the time of day. Unlike a
    wall clock, their sum never jumps, and all processes of the machine share it."""

    __tablename__ = "clocks"

    id: int = Field(primary_key=True)
    boot_id: str
    start: float


class Ran(SQLModel):
    """The columns that results and cases share: what a run of a program did and used."""

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
    """The result of a job. The primary key makes a second result impossible."""

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
    """Characters of all outputs, those of the cases included, so that readers can fetch a bounded part at a time."""
    started_at: float | None = None
    finished_at: float


class CaseRow(Ran, table=True):
    """The result of one case of a job."""

    __tablename__ = "cases"

    job_id: str = Field(primary_key=True, foreign_key="jobs.id")
    index: int = Field(primary_key=True)


class TallyRow(SQLModel, table=True):
    """How many results of a batch have which verdict. Each writer has rows of its own, so that writers do not wait for
    each other. The sum over all writers is the count."""

    __tablename__ = "tallies"

    batch_id: str = Field(primary_key=True, foreign_key="batches.id")
    verdict: str = Field(primary_key=True)
    writer: str = Field(primary_key=True)
    count: int


class LetterRow(SQLModel, table=True):
    """A dead letter: a message that no worker could read."""

    __tablename__ = "letters"

    id: int | None = Field(default=None, primary_key=True)
    worker: str
    reason: str = Field(sa_type=Text)
    body: str = Field(sa_type=Text)
    """The beginning of the message."""
    arrived_at: float


# The tables and conditions that all queries share. The states are spelt out: a partial index applies only if its
# condition is in the text of the query and not in a parameter.

BATCHES, JOBS, TURNS, WORKERS = (SQLModel.metadata.tables[name] for name in ("batches", "jobs", "turns", "workers"))
RESULTS, CASES, TALLIES, LETTERS = (
    SQLModel.metadata.tables[name] for name in ("results", "cases", "tallies", "letters")
)
QUEUED, RUNNING, TWINS = (text(f"jobs.state = '{state}'") for state in (State.QUEUED, State.RUNNING, TWIN))
DIGESTED, UNFINISHED = text("jobs.digest IS NOT NULL"), text("batches.todo IS NOT NULL")


def span(batch_id: str, start: int, count: int) -> ColumnElement[bool]:
    """The SQL condition for up to `count` jobs of a batch, from its `start`-th on."""
    return and_(JOBS.c.batch_id == batch_id, JOBS.c.seq >= start, JOBS.c.seq < start + count)
