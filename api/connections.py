"""The store, the bell, the ear and the fleet for the current settings. All but the fleet are opened once in a
process."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from sqlalchemy import Connection, exc

from evalpool.api.combiner import Combiner
from evalpool.api.ear import Ear
from evalpool.schemas.database import Database, cause
from evalpool.schemas.errors import DatabaseUnavailable
from evalpool.schemas.fleet import Fleet
from evalpool.schemas.result import Result
from evalpool.schemas.settings import settings
from evalpool.schemas.store import Store
from evalpool.worker.queue.notify import Bell

TOGETHER = 100
"""The most jobs that threads submit, or results that they read, in one transaction."""
FRESH = 0.5
"""Seconds for which a list of live workers is used before it is read again."""

_opening = threading.Lock()
"""Two threads that ask at once must get the same connection pool."""
_asking = threading.Lock()
"""One thread at a time lists the workers. Event loops open the ear in their own thread, and must not wait for it."""
_fleets: dict[Store, tuple[float, Fleet]] = {}


def store() -> Store:
    """The door to the rows of the configured database."""
    with _opening:
        return _store(os.getpid(), settings().store_url, settings().fleet or "")


def bell() -> Bell:
    """The bell of the configured Redis."""
    with _opening:
        return _bell(os.getpid(), settings().queue_url)


def ear() -> Ear:
    """What hears the bell of the configured Redis."""
    ringing = bell()
    with _opening:
        return _ear(os.getpid(), ringing)


def readings() -> Combiner[str, Result | None]:
    """What reads the result of a job, if it has one. Threads that ask at the same time share a query."""
    ledger = store()
    with _opening:
        return _readings(ledger)


def fleet() -> Fleet:
    """The live workers that can claim what is submitted here. The list is cached for `FRESH` seconds, so that most
    submissions cost no extra query."""
    ledger = store()
    with _asking:
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
    def glance(self) -> Iterator[Connection]:
        with _translated(), super().glance() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        with _translated(), super().write() as connection:
            yield connection


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except exc.SQLAlchemyError as error:
        raise DatabaseUnavailable(f"the database failed: {cause(error)}") from error


def away(error: Exception) -> bool:
    """Whether the database did not answer, whatever it was asked."""
    return isinstance(error.__cause__, exc.OperationalError | exc.InterfaceError | exc.TimeoutError)


# One for each process: two processes that share a connection after a fork would mix up their messages.
@cache
def _store(_process: int, url: str, fleet: str) -> Store:
    return Store(_Translated(url, upgrade=settings().database_url is None), fleet)


@cache
def _bell(_process: int, url: str) -> Bell:
    return Bell(url)


@cache
def _ear(_process: int, ringing: Bell) -> Ear:
    return Ear(ringing)


@cache
def _readings(ledger: Store) -> Combiner[str, Result | None]:
    def read(job_ids: Sequence[str]) -> list[Result | None]:
        found = {result.job_id: result for part in ledger.results(job_ids) for result in part}
        return [found.get(job_id) for job_id in job_ids]

    return Combiner(read, TOGETHER, away)
