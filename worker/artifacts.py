"""What compilers made, by what they made it of: the same source is compiled once on a worker."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from worker.sandbox.base import Outcome

ROOM = 128 << 20
"""Bytes of all that is kept."""


class Artifacts:
    """The outcomes of compilers that succeeded, the latest used ones."""

    def __init__(self, room: int = ROOM) -> None:
        self._room, self._used = room, 0
        self._kept: OrderedDict[str, Outcome] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, key: str, make: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """What was made before under this key, or is made now. Two that want the same do not make it twice."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            made = await make()
            if made.ended == "itself" and made.exit_code == 0:  # a failure may have been the machine's
                self._kept[key] = made
                self._used += len(made.stdout)
            while self._used > self._room:
                _, oldest = self._kept.popitem(last=False)
                self._used -= len(oldest.stdout)
            return made
