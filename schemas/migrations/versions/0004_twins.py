"""Columns for identical jobs that share a result, for how a batch was made, and for how near a limit a result is."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, and two indexes that find identical jobs."""
    op.add_column("batches", sa.Column("about", sa.Text()))
    op.add_column("jobs", sa.Column("digest", sa.String()))
    op.add_column("jobs", sa.Column("twin_of", sa.String()))
    for name, column, which in (
        ("ix_jobs_twins", "twin_of", "state = 'twin'"),
        ("ix_jobs_digest", "digest", "digest IS NOT NULL"),
    ):
        op.create_index(name, "jobs", [column], sqlite_where=sa.text(which), postgresql_where=sa.text(which))
    for table in ("results", "cases"):
        op.add_column(table, sa.Column("limit_share", sa.Float(), nullable=False, server_default="0"))
        op.add_column(table, sa.Column("rerun", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("results", sa.Column("comparator", sa.String()))
    op.add_column("results", sa.Column("shared_with", sa.String()))


def downgrade() -> None:
    """Drop the indexes and the columns."""
    for index in ("ix_jobs_twins", "ix_jobs_digest"):
        op.drop_index(index, "jobs")
    for table, columns in {
        "results": ("shared_with", "comparator", "rerun", "limit_share"),
        "cases": ("rerun", "limit_share"),
        "jobs": ("twin_of", "digest"),
        "batches": ("about",),
    }.items():
        for column in columns:
            op.drop_column(table, column)
