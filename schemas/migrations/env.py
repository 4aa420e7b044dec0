"""The script that Alembic runs, on the connection and in the transaction of `schemas.database`."""

from alembic import context
from sqlmodel import SQLModel

from evalpool.schemas import tables  # noqa: F401 - registers the tables that autogenerate compares with

context.configure(
    connection=context.config.attributes["connection"], target_metadata=SQLModel.metadata, render_as_batch=True
)
context.run_migrations()
