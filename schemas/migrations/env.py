"""Run by Alembic on the connection that `schemas.database` hands over, inside its transaction."""

from alembic import context
from sqlmodel import SQLModel

from schemas import tables  # noqa: F401 - registers the tables that autogenerate compares with

context.configure(
    connection=context.config.attributes["connection"], target_metadata=SQLModel.metadata, render_as_batch=True
)
context.run_migrations()
