"""The store, the bell and the fleet of the settings of this moment, the first two opened once."""

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
"""Seconds for which what workers said of themselves is taken as it is."""

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
    """The workers that are alive, as of a moment ago: a submission must not pay for asking."""
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
