"""The store, the bell and the fleet for the current settings. The store and the bell are opened once per process."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from evalpool.schemas.database import Database, cause
from evalpool.schemas.errors import DatabaseUnavailable
from evalpool.schemas.fleet import Fleet
from evalpool.schemas.settings import settings
from evalpool.schemas.store import Store
from evalpool.worker.queue.notify import Bell

FRESH = 0.5
"""Seconds for which a list of live workers is used before it is read again."""

_opening = threading.Lock()
"""Two threads that ask at once must get the same connection pool."""
_fleets: dict[Store, tuple[float, Fleet]] = {}


def store() -> Store:
    """The door to the rows of the configured database."""
    with _opening:
        return _store(os.getpid(), settings().store_url, settings().fleet or "")


def bell() -> Bell:
    """The bell of the configured Redis."""
    with _opening:
        return _bell(os.getpid(), settings().queue_url)


def fleet() -> Fleet:
    """The live workers that can claim what is submitted here. The list is cached for `FRESH` seconds, so that most
    submissions cost no extra query."""
    ledger = store()
    with _opening:
        asked, found = _fleets.get(ledger, (-FRESH, Fleet()))
        if time.monotonic() - asked >= FRESH:
            found = ledger.fleet(settings().lease_seconds)
            _fleets[ledger] = time.monotonic(), found
        return found


class _Translated(Database):
    """A database whose errors are raised as `DatabaseUnavailable`: SQLAlchemy's own would show the statement, its
    values and a link."""

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with _translated(), super().read() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        with _translated(), super().write() as connection:
            yield connection


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        raise DatabaseUnavailable(f"the database failed: {cause(error)}") from error


# One for each process: two processes that share a connection after a fork would mix up their messages.
@cache
def _store(_process: int, url: str, fleet: str) -> Store:
    return Store(_Translated(url, upgrade=settings().database_url is None), fleet)


@cache
def _bell(_process: int, url: str) -> Bell:
    return Bell(url)
