"""Jobs belong to a fleet, so that the worker of a private run and all other workers do not take each other's jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

QUEUED = sa.text("state = 'queued'")


def upgrade() -> None:
    """Put all jobs into the fleet without a name, and begin the index of the queue with the fleet."""
    op.add_column("jobs", sa.Column("fleet", sa.String(), nullable=False, server_default=""))
    _index("fleet", "priority", "rank", "image")


def downgrade() -> None:
    """Give all jobs to all workers again."""
    _index("priority", "rank", "image")
    op.drop_column("jobs", "fleet")


def _index(*columns: str) -> None:
    op.drop_index("ix_jobs_queue", "jobs")
    op.create_index("ix_jobs_queue", "jobs", list(columns), sqlite_where=QUEUED, postgresql_where=QUEUED)
