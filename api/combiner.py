"""Combines what several threads ask for at the same time into one call, as a commit for ten costs little more than a
commit for one.

A signal such as Ctrl-C may raise an exception in the main thread between any two steps. So no step loses a call: calls
stay in the queue until they are answered, and every thread that leaves appoints another one if it led.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")

SECONDS = 60.0
"""How long an interrupted caller waits to learn what became of its call."""


@dataclass(eq=False)
class _Call(Generic[A]):
    given: A
    done: bool = False
    answer: Any = None
    error: Exception | None = None
    turn: "SimpleQueue[None]" = field(default_factory=SimpleQueue)
    """Wakes the thread when its call is done, and when it is to carry out the next group. An interrupt cannot divide a
    `put`, as it can divide what `threading.Event` does."""


class Combiner(Generic[A, R]):
    """Carries out calls in groups. A call that comes alone is carried out at once; those that come meanwhile are
    carried out together afterwards, by the first of their threads."""

    def __init__(
        self,
        act: Callable[[Sequence[A]], Sequence[R]],
        most: int,
        fails_all: Callable[[Exception], bool] = lambda _error: False,
    ) -> None:
        """Use `act`, which returns an answer for each call that it is given, for groups of at most `most` calls.
        `fails_all` says whether an error would be that of each call of the group alone, too."""
        self._act, self._most, self._fails_all = act, most, fails_all
        self._waiting: deque[_Call[A]] = deque()
        """The calls that are not done, in the order of their arrival."""
        self._group: Sequence[_Call[A]] = ()
        """The first of them, which are being carried out."""
        self._leader: _Call[A] | None = None
        """The call whose thread carries out the present group, or is to carry out the next."""
        self._lock = threading.Lock()
        """Protects the three above."""

    def call(self, given: A) -> R:
        """Return the answer to this call, or raise the error that it alone would have caused."""
        call = _Call(given)
        try:
            with self._lock:
                if leads := self._leader is None:
                    self._leader = call
                self._waiting.append(call)
            if not leads:
                call.turn.get()
            if not call.done:
                self._lead(call)
        except BaseException:
            self._withdraw(call)
            raise
        if call.error is not None:
            raise call.error
        answer: R = call.answer
        return answer

    def _lead(self, call: _Call[A]) -> None:
        """Carry out the calls that wait, this thread's own among them, and let another thread carry out the next."""
        # An exception that a signal raises cannot be told from one of `act`. It must not become that of other callers.
        most = 1 if threading.current_thread() is threading.main_thread() else self._most
        with self._lock:
            self._leader, self._group = call, list(islice(self._waiting, most))
        self._answer(self._group)
        with self._lock:
            self._pass_on()

    def _answer(self, group: Sequence[_Call[A]]) -> None:
        try:
            answers = self._act([call.given for call in group])
        except Exception as error:
            if len(group) == 1 or self._fails_all(error):
                for call in group:
                    call.error, call.done = error, True
            else:  # one of them may have caused it, and must not fail the others
                for call in group:
                    self._answer([call])
                    call.turn.put(None)
        else:
            for call, answer in zip(group, answers, strict=True):
                call.answer, call.done = answer, True

    def _pass_on(self) -> None:
        """Wake the threads whose calls are done, and the one that is to carry out the next group. The caller holds the
        lock."""
        while self._waiting and self._waiting[0].done:
            self._waiting[0].turn.put(None)
            self._waiting.popleft()
        if self._waiting:
            self._waiting[0].turn.put(None)
        self._leader, self._group = self._waiting[0] if self._waiting else None, ()

    def _withdraw(self, call: _Call[A]) -> None:
        """Take back the call of a thread that was interrupted or, if another thread is carrying it out, wait for its
        end, so that the caller can undo it."""
        try:
            with self._lock:
                elsewhere = call in self._group and call is not self._leader and not call.done
            if elsewhere:
                with suppress(Empty):
                    call.turn.get(timeout=SECONDS)
        finally:
            with self._lock:
                if call in self._waiting:
                    self._waiting.remove(call)
                if call is self._leader:
                    self._pass_on()
