"""The tables of batches, jobs, results and cases."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

QUEUED, RUNNING = sa.text("state = 'queued'"), sa.text("state = 'running'")


def ran() -> list[sa.Column[object]]:
    """The columns that results and cases share."""
    return [
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("exit_code", sa.Integer()),
        sa.Column("signal", sa.Integer()),
        sa.Column("stdout", sa.Text(), nullable=False),
        sa.Column("stderr", sa.Text(), nullable=False),
        sa.Column("stdout_truncated", sa.Boolean(), nullable=False),
        sa.Column("stderr_truncated", sa.Boolean(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("wall_seconds", sa.Float(), nullable=False),
        sa.Column("cpu_seconds", sa.Float(), nullable=False),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("oom_killed", sa.Boolean(), nullable=False),
        sa.Column("processes_peak", sa.Integer(), nullable=False),
        sa.Column("output_bytes", sa.BigInteger(), nullable=False),
        sa.Column("queue_seconds", sa.Float(), nullable=False),
        sa.Column("setup_seconds", sa.Float(), nullable=False),
        sa.Column("sandbox_uses", sa.Integer(), nullable=False),
    ]


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("name", sa.String()),
        sa.Column("idempotency_key", sa.String(), unique=True),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("cancelled_at", sa.Float()),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("batch_id", sa.String(), sa.ForeignKey("batches.id"), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("task_id", sa.String()),
        sa.Column("sample_id", sa.String()),
        sa.Column("labels", sa.Text()),
        sa.Column("priority", sa.String(), nullable=False),
        sa.Column("rank", sa.Float(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String()),
        sa.Column("lease_until", sa.Float()),
        sa.Column("published_at", sa.Float()),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float()),
        sa.Column("cancelled_at", sa.Float()),
        sa.Column("failures", sa.Text()),
    )
    op.create_index("ix_jobs_batch", "jobs", ["batch_id", "seq"], unique=True)
    op.create_index("ix_jobs_queue", "jobs", ["priority", "rank"], sqlite_where=QUEUED, postgresql_where=QUEUED)
    op.create_index("ix_jobs_running", "jobs", ["lease_until"], sqlite_where=RUNNING, postgresql_where=RUNNING)
    turns = op.create_table(
        "turns", sa.Column("id", sa.Integer(), primary_key=True), sa.Column("value", sa.Float(), nullable=False)
    )
    op.bulk_insert(turns, [{"id": 1, "value": 0.0}])
    op.create_table(
        "results",
        sa.Column("job_id", sa.String(), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("batch_id", sa.String(), sa.ForeignKey("batches.id"), nullable=False),
        *ran(),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String()),
        sa.Column("sandbox_id", sa.String()),
        sa.Column("image_digest", sa.String()),
        sa.Column("started_at", sa.Float()),
        sa.Column("finished_at", sa.Float(), nullable=False),
    )
    op.create_index("ix_results_batch", "results", ["batch_id", "verdict"])
    op.create_table(
        "cases",
        sa.Column("job_id", sa.String(), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("index", sa.Integer(), primary_key=True),
        *ran(),
    )
