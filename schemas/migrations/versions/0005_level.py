"""Wake-ups carry no ids, images are pinned at submission, and the results of a batch are counted as they come in."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

QUEUED, RUNNING = sa.text("state = 'queued'"), sa.text("state = 'running'")
UNFINISHED = sa.text("todo IS NOT NULL")


def upgrade() -> None:
    """Add the new columns and tables, and count the results of existing batches."""
    op.drop_index("ix_jobs_unannounced", "jobs")
    op.drop_index("ix_jobs_queue", "jobs")
    op.drop_column("jobs", "published_at")
    op.add_column("jobs", sa.Column("image", sa.String()))
    op.create_index(
        "ix_jobs_queue", "jobs", ["priority", "rank", "image"], sqlite_where=QUEUED, postgresql_where=QUEUED
    )
    op.create_index("ix_jobs_under_way", "jobs", ["batch_id"], sqlite_where=RUNNING, postgresql_where=RUNNING)
    op.add_column("batches", sa.Column("todo", sa.String()))
    op.add_column("batches", sa.Column("pins", sa.Text()))
    op.create_index("ix_batches_todo", "batches", ["todo"], sqlite_where=UNFINISHED, postgresql_where=UNFINISHED)
    op.add_column("results", sa.Column("decisive", sa.Integer()))
    op.add_column("results", sa.Column("size", sa.Integer()))
    op.create_table(
        "workers",
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.Column("about", sa.Text(), nullable=False),
    )
    op.create_table(
        "clocks",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("boot_id", sa.String(), nullable=False),
        sa.Column("start", sa.Float(), nullable=False),
    )
    op.create_table(
        "tallies",
        sa.Column("batch_id", sa.String(), sa.ForeignKey("batches.id"), primary_key=True),
        sa.Column("verdict", sa.String(), primary_key=True),
        sa.Column("writer", sa.String(), primary_key=True),
        sa.Column("count", sa.Integer(), nullable=False),
    )
    op.execute(
        "INSERT INTO tallies (batch_id, verdict, writer, count) "
        "SELECT batch_id, verdict, '', count(*) FROM results GROUP BY batch_id, verdict"
    )


def downgrade() -> None:
    """Raise an error: texts are stored compressed now, and the version before would not decompress them."""
    raise RuntimeError("schema 0005 cannot be downgraded: restore the backup that was made before the upgrade")
