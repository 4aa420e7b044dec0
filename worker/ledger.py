"""The store as the event loop sees it: every query in the one thread that owns the connection."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from schemas.store import Store

P = ParamSpec("P")
T = TypeVar("T")


class Ledger:
    """One thread for all queries of a worker: SQLite has one writer anyway, and a commit per group needs no more."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    async def call(self, query: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query of the store, given as `Store.query`, and await its answer."""
        bound: Callable[P, T] = getattr(self._store, query.__name__)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: bound(*args, **kwargs))

    def close(self) -> None:
        """Finish what is under way and let go of the database."""
        self._thread.shutdown(wait=True)
        self._store.database.close()
