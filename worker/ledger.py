"""The store for the event loop: all queries run in one thread, except the renewal of leases, which cannot wait for a
long commit."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from evalpool.schemas.store import Store

P = ParamSpec("P")
T = TypeVar("T")


class Ledger:
    """Runs the queries of a worker in one thread, since SQLite has one writer anyway and results are committed in
    groups."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._other = ThreadPoolExecutor(1, thread_name_prefix="leases")

    async def call(self, query: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query of the store, given as `Store.query`, and return its answer."""
        return await self._run(self._thread, query, *args, **kwargs)

    async def at_once(self, query: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same in another thread, even while the first one is busy."""
        return await self._run(self._other, query, *args, **kwargs)

    def close(self) -> None:
        """Wait for the queries that run, and close the database."""
        self._thread.shutdown(wait=True)
        self._other.shutdown(wait=True)
        self._store.database.close()

    async def _run(
        self,
        thread: ThreadPoolExecutor,
        query: Callable[Concatenate[Store, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, lambda: query(self._store, *args, **kwargs))
