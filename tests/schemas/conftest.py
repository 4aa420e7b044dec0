"""Fixtures that run every test of the store with SQLite and with PostgreSQL."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalpool.schemas.database import Database
from evalpool.schemas.store import Store
from tests.conftest import missing
from tests.faults.servers import Missing, PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer().start()
    except Missing as error:
        missing(str(error))
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty ledger."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        name = f"t{secrets.token_hex(6)}"
        server.execute(f"CREATE DATABASE {name}")
        url = server.url(name).replace("postgresql://", "postgresql+psycopg://", 1)
    database = Database(url)
    yield Store(database)
    database.close()
