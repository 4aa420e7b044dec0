"""An index for jobs that were not yet announced to Redis, so that finding them does not read all others."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the index, which is nearly always empty."""
    silent = sa.text("state = 'queued' AND published_at IS NULL")
    op.create_index("ix_jobs_unannounced", "jobs", ["id"], sqlite_where=silent, postgresql_where=silent)


def downgrade() -> None:
    """Drop the index."""
    op.drop_index("ix_jobs_unannounced", "jobs")
