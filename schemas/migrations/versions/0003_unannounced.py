"""Jobs that Redis was not told of are found without a look at those that it was."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """An index that is nearly always empty."""
    silent = sa.text("state = 'queued' AND published_at IS NULL")
    op.create_index("ix_jobs_unannounced", "jobs", ["id"], sqlite_where=silent, postgresql_where=silent)


def downgrade() -> None:
    """Without."""
    op.drop_index("ix_jobs_unannounced", "jobs")
