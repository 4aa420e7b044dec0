"""Hears the bell (the Redis notification of results) for every caller of this process that waits: one thread with one
connection, however many jobs are waited for.

All batches that this process submits share a channel, which is subscribed once. The bell only saves time, since the
rows decide: whenever something may have been missed, callers are told to read them.
"""

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Protocol
from weakref import WeakValueDictionary

import redis

from evalpool.schemas.rows import batch_of
from evalpool.worker.queue.notify import Bell, channel, ids_in
from evalpool.worker.queue.publish import UNREACHABLE

log = logging.getLogger("evalpool.ear")

QUIET = 1.0
"""Seconds without the bell after which callers read the rows, and seconds for which nobody must wait until a channel is
left or the connection is closed."""
STEP = 0.1
"""Seconds after which the channel of a batch that another process submitted is subscribed, at the latest."""

_origins: dict[int, str] = {}


def origin() -> str:
    """Return the name of this process in the ids of its batches: four hexadecimal digits. Two processes with the same
    name hear of each other's jobs and ignore them."""
    return _origins.setdefault(os.getpid(), secrets.token_hex(2))


class Hearer(Protocol):
    """Whoever waits for jobs of one batch."""

    def hear(self, ids: list[str] | None, /) -> None:
        """Take note that these jobs have results or, with `None`, that the rows must be read. It is called in the
        thread of the ear, and must not block."""


class Rings:
    """What a thread has heard about a batch."""

    def __init__(self) -> None:
        self._heard: SimpleQueue[list[str] | None] = SimpleQueue()
        self.hear = self._heard.put

    def wait(self, seconds: float) -> list[str] | None:
        """Return the jobs of the next ring; none if there was silence for so long, and `None` if the rows must be
        read."""
        try:
            return self._heard.get(timeout=seconds)
        except Empty:
            return []


class Ear:
    """Listens while anybody waits."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._waiting: dict[str, dict[str, set[Hearer]]] = {}
        """Channel → batch id → those who wait for the batch."""
        self._expected: WeakValueDictionary[str, Rings] = WeakValueDictionary()
        """Those who wait for batches that are being submitted here. They are forgotten together with their handles."""
        self._own = channel(f"{'':12}{origin()}")
        self._hears = False
        """Whether nothing is missed on our own channel."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Protects all of the above."""
        self._leaving: deque[tuple[str, Hearer]] = deque()
        """Those who no longer wait. The garbage collector may end their waiting anywhere, even where this thread holds
        the lock, so they do not take it."""

    def expect(self, batch_id: str) -> Rings | None:
        """Hear of a batch that is about to be submitted here, as long as the value is kept. Returns `None` while the
        ear is not listening: then results may be missed."""
        with self._lock:
            if not self._hears:
                return None
            rings = self._expected[batch_id] = Rings()
            return rings

    @contextmanager
    def listen(self, batch_id: str, hearer: Hearer) -> Iterator[None]:
        """Let `hearer` hear of a batch. Read the rows after entering, since earlier rings are missed."""
        try:
            with self._lock:
                self._waiting.setdefault(channel(batch_id), {}).setdefault(batch_id, set()).add(hearer)
                if self._thread is None:
                    thread = threading.Thread(target=self._keep, name="evalpool-ear", daemon=True)
                    thread.start()
                    self._thread = thread
            yield
        finally:
            self._leaving.append((batch_id, hearer))

    def _keep(self) -> None:
        """Listen until nobody has waited for a while. While Redis cannot be reached, callers read the rows."""
        while True:
            try:
                with closing(self._bell.subscription()) as pubsub:
                    self._follow(pubsub)
                    return
            except Exception as error:
                if not isinstance(error, (*UNREACHABLE, ValueError)):  # the latter if the client is closed meanwhile
                    log.exception("listening failed", extra={"action": "bug"})
                with self._lock:
                    self._miss()
                if self._alone():
                    return
                time.sleep(QUIET)

    def _follow(self, pubsub: "redis.client.PubSub") -> None:
        needed: dict[str, float] = {}
        """Channel → when somebody last waited on it."""
        while True:
            now = time.monotonic()
            with self._lock:
                self._let_go()
                new = {self._own, *self._waiting} - needed.keys()
                needed |= dict.fromkeys([*new, *self._waiting], now)
            old = {each for each in needed if now - needed[each] >= QUIET} - {self._own}
            if new:
                pubsub.subscribe(*new)
            if old:
                pubsub.unsubscribe(*old)  # type: ignore[no-untyped-call]
                needed = {each: when for each, when in needed.items() if each not in old}
            self._deliver(pubsub.get_message(timeout=STEP))
            if now - max(needed.values()) >= QUIET and self._alone():
                return

    def _alone(self) -> bool:
        """End the thread if nobody waits. Returns whether it ends."""
        with self._lock:
            self._let_go()
            if self._waiting:
                return False
            self._miss()
            self._thread = None
            return True

    def _let_go(self) -> None:
        """Forget those who no longer wait. The caller holds the lock."""
        while self._leaving:
            batch_id, hearer = self._leaving.popleft()
            here = self._waiting.get(channel(batch_id), {})
            hearers = here.get(batch_id, set())
            hearers.discard(hearer)
            if not hearers:
                here.pop(batch_id, None)
            if not here:
                self._waiting.pop(channel(batch_id), None)

    def _miss(self) -> None:
        """Note that something may have been missed: whoever holds a handle will read the rows first. The caller holds
        the lock."""
        self._hears = False
        for rings in list(self._expected.values()):
            rings.hear(None)
        self._expected.clear()

    def _deliver(self, message: object) -> None:
        if not isinstance(message, dict) or message["type"] not in ("subscribe", "message"):
            return
        heard_on = message["channel"].decode()
        ids = ids_in(message["data"], heard_on) if message["type"] == "message" else None
        with self._lock:
            here = self._waiting.get(heard_on, {})
            rung: Mapping[str, list[str] | None]
            if ids is None:  # listening begins here, or again, or the message is not one of ours
                rung = dict.fromkeys(here)
                if heard_on == self._own:
                    self._miss()
                    self._hears = True
            else:
                rung = {batch_id: list(jobs) for batch_id, jobs in groupby(sorted(ids, key=batch_of), key=batch_of)}
            heard = [(hearer, rung[batch_id]) for batch_id in rung for hearer in self._of(batch_id, here)]
        for hearer, jobs in heard:
            hearer.hear(jobs)

    def _of(self, batch_id: str, here: Mapping[str, set[Hearer]]) -> set[Hearer]:
        expecting = self._expected.get(batch_id)
        return here.get(batch_id, set()) | ({expecting} if expecting is not None else set())
