"""A cache of what compilers made, so that a worker compiles the same source once."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from evalpool.worker.sandbox.base import End, Outcome

ROOM = 128 << 20
"""How many bytes are kept in all."""


class Artifacts:
    """Keeps the outcomes of compilers that succeeded; the least recently used ones are forgotten first."""

    def __init__(self, room: int = ROOM) -> None:
        self._room, self._used = room, 0
        self._kept: OrderedDict[str, Outcome] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, key: str, make: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Return the outcome that is kept under this key, or else make it. Two callers with the same key make it
        once."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            made = await make()
            if made.ended is End.ITSELF and made.exit_code == 0:  # a failure may have been the machine's
                self._kept[key] = made
                self._used += len(made.stdout)
            while self._used > self._room:
                _, oldest = self._kept.popitem(last=False)
                self._used -= len(oldest.stdout)
            return made
