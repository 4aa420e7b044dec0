"""Combines what several threads ask for at the same time into one call, as a commit for ten costs little more than a
commit for one."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")

SECONDS = 60.0
"""How long an interrupted caller waits to learn what became of its call."""


@dataclass(eq=False)
class _Call(Generic[A, R]):
    given: A
    answer: "Future[R]" = field(default_factory=Future)
    turn: threading.Event = field(default_factory=threading.Event)
    """Set when the call is answered, and when its thread is to carry out the next group."""


class Combiner(Generic[A, R]):
    """Carries out calls in groups. A call that comes alone is carried out at once; those that come meanwhile are
    carried out together afterwards, by the first of their threads."""

    def __init__(self, act: Callable[[Sequence[A]], Sequence[R]], most: int) -> None:
        """Use `act`, which returns an answer for each call that it is given, for groups of at most `most` calls."""
        self._act, self._most = act, most
        self._waiting: deque[_Call[A, R]] = deque()
        self._busy = False
        self._lock = threading.Lock()
        """Protects the two above."""

    def call(self, given: A) -> R:
        """Return the answer to this call, or raise the error that it alone would have caused."""
        call: _Call[A, R] = _Call(given)
        with self._lock:
            self._waiting.append(call)
            lead, self._busy = not self._busy, True
        try:
            if not lead:
                call.turn.wait()
            if not call.answer.done():
                self._lead()
        except BaseException:
            self._withdraw(call)
            raise
        return call.answer.result()

    def _lead(self) -> None:
        """Carry out the calls that wait, this thread's own among them, and let another thread carry out the next."""
        with self._lock:
            group = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
        try:
            self._answer(group)
        finally:
            self._pass_on()
            for call in group:
                if not call.answer.done():  # this thread was interrupted, and the others must not wait for ever
                    call.answer.set_exception(RuntimeError("the thread that made this call for others was interrupted"))
                call.turn.set()

    def _answer(self, group: Sequence[_Call[A, R]]) -> None:
        try:
            answers = self._act([call.given for call in group])
        except Exception as error:
            if len(group) == 1:
                group[0].answer.set_exception(error)
            else:  # one of them may have caused it, and must not fail the others
                for call in group:
                    self._answer([call])
        else:
            for call, answer in zip(group, answers, strict=True):
                call.answer.set_result(answer)

    def _pass_on(self) -> None:
        with self._lock:
            self._busy = bool(self._waiting)
            if self._busy:
                self._waiting[0].turn.set()

    def _withdraw(self, call: _Call[A, R]) -> None:
        """Take back the call of a thread that was interrupted or, if it is being carried out, wait for its end, so that
        the caller can undo it."""
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
                led = call.turn.is_set()
            else:
                led = False
        if led:  # it was this thread's turn to carry out the next group
            self._pass_on()
        elif not call.answer.done():
            call.turn.wait(SECONDS)
