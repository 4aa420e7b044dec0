"""The store, the bell and the fleet for the current settings. The store and the bell are opened once per process."""

import os
import threading
import time
from functools import cache

from schemas.database import Database
from schemas.fleet import Fleet
from schemas.settings import settings
from schemas.store import Store
from worker.bell import Bell

FRESH = 0.5
"""Seconds for which a list of live workers is used before it is read again."""

_opening = threading.Lock()
"""Two threads that ask at once must get the same connection pool."""
_fleets: dict[Store, tuple[float, Fleet]] = {}


def store() -> Store:
    """The door to the rows of the configured database."""
    with _opening:
        return _store(os.getpid(), settings().store_url)


def bell() -> Bell:
    """The bell of the configured Redis."""
    with _opening:
        return _bell(os.getpid(), settings().queue_url)


def fleet() -> Fleet:
    """The live workers. The list is cached for `FRESH` seconds, so that most submissions cost no extra query."""
    ledger = store()
    with _opening:
        asked, found = _fleets.get(ledger, (-FRESH, Fleet()))
        if time.monotonic() - asked >= FRESH:
            found = ledger.fleet(settings().lease_seconds)
            _fleets[ledger] = time.monotonic(), found
        return found


# By process, since a connection that two processes share after a fork mixes up their words.
@cache
def _store(_process: int, url: str) -> Store:
    return Store(Database(url, upgrade=settings().database_url is None))


@cache
def _bell(_process: int, url: str) -> Bell:
    return Bell(url)
