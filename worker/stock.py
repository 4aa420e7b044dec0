"""The stock of one kind of sandbox in a pool: those that are idle, and the jobs that wait for one."""

import asyncio
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from evalpool.worker.sandbox.base import Box, Shape


@dataclass(eq=False)
class Wait:
    """A job that waits for a sandbox."""

    shape: Shape
    wish: Shape
    """The shape with the imports that the job would like to find; the same if sandboxes of this kind are there."""
    fresh: bool
    """Whether only a sandbox will do in which nothing has run yet."""
    number: int
    """Its place in the order of arrival."""
    task: "asyncio.Task[Any] | None"
    got: asyncio.Future[Box]


@dataclass(eq=False)
class Stock:
    """The sandboxes of one kind, and the jobs that wait for one."""

    preloaded: bool = False
    """Whether its sandboxes have imported libraries for their programs."""
    idle: list[Box] = field(default_factory=list)
    """The one that was used last is at the end."""
    waiting: deque[Wait] = field(default_factory=deque)
    waiting_fresh: deque[Wait] = field(default_factory=deque)
    alive: int = 0
    """How many there are, idle or not."""
    resetting: int = 0
    starting: int = 0
    own: int = 0
    """How many of those that start have their job already."""

    @property
    def count(self) -> int:
        """How many there are or soon will be."""
        return self.alive + self.starting

    @property
    def coming(self) -> int:
        """How many start for the jobs that wait."""
        return self.starting - self.own

    @property
    def wanted(self) -> bool:
        """Whether a job waits."""
        return bool(self.waiting or self.waiting_fresh)

    def queue(self, wait: Wait) -> deque[Wait]:
        """The queue in which a job waits."""
        return self.waiting_fresh if wait.fresh else self.waiting

    def waits(self) -> Iterator[Wait]:
        """The jobs that wait, in the order of their arrival."""
        return iter(sorted((*self.waiting, *self.waiting_fresh), key=lambda wait: wait.number))

    def first(self, *, fresh: bool = True) -> Wait | None:
        """The job that has waited longest; without `fresh`, of those that take any sandbox."""
        heads = [queue[0] for queue in (self.waiting, self.waiting_fresh if fresh else ()) if queue]
        return min(heads, key=lambda wait: wait.number, default=None)

    def turn(self) -> int:
        """The place of the first job that waits in the order of arrival."""
        first = self.first()
        return first.number if first is not None else sys.maxsize

    def pick(self, wait: Wait) -> Box:
        """Take the idle sandbox that suits best: if possible, one that has these limits already; of several, the one
        that has rested longest."""
        fit = [box for box in self.idle if not (wait.fresh and box.uses)]
        box = next((box for box in fit if box.shape == wait.shape), fit[0])
        self.idle.remove(box)
        return box

    def lacks(self, most: int) -> bool:
        """Whether one more should be started for the jobs that wait."""
        if len(self.waiting) + len(self.waiting_fresh) <= self.coming + min(self.resetting, len(self.waiting)):
            return False
        if self.waiting_fresh and self.coming < len(self.waiting_fresh):
            return self.count < most or any(box.uses for box in self.idle)
        # The stock is doubled at most, since short jobs are served by few sandboxes sooner than many are started.
        return self.count < most and self.coming < max(1, self.alive)
