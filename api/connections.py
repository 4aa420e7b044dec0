"""The store and the bell of the settings of this moment, each opened once."""

import os
import threading
from functools import cache

from schemas.database import Database
from schemas.settings import settings
from schemas.store import Store
from worker.bell import Bell

_opening = threading.Lock()
"""Two threads that ask at once must get the same connection pool."""


def store() -> Store:
    """The door to the rows of the configured database."""
    with _opening:
        return _store(os.getpid(), settings().store_url)


def bell() -> Bell:
    """The bell of the configured Redis."""
    with _opening:
        return _bell(os.getpid(), settings().queue_url)


# By process, since a connection that two processes share after a fork mixes up their words.
@cache
def _store(_process: int, url: str) -> Store:
    return Store(Database(url))


@cache
def _bell(_process: int, url: str) -> Bell:
    return Bell(url)
