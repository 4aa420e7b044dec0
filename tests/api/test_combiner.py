"""Calls that threads make at the same time are carried out together."""

import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from evalpool.api import combiner as module
from evalpool.api.combiner import Combiner
from tests.conftest import PATIENCE, eventually


class Doubler:
    """Doubles numbers. The first call waits until `go` is set, so that others come meanwhile."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.go = threading.Event()

    def __call__(self, numbers: Sequence[int]) -> list[int]:
        self.groups.append(list(numbers))
        assert self.go.wait(PATIENCE)
        if 13 in numbers:
            raise ValueError("13 cannot be doubled")
        return [2 * number for number in numbers]


def test_a_call_that_comes_alone_is_carried_out_at_once() -> None:
    act = Doubler()
    act.go.set()
    combiner = Combiner(act, 100)
    assert [combiner.call(1), combiner.call(2)] == [2, 4]
    assert act.groups == [[1], [2]]


def test_calls_that_come_meanwhile_are_carried_out_together_in_groups_of_bounded_size() -> None:
    act = Doubler()
    combiner: Combiner[int, int] = Combiner(act, 4)
    with ThreadPoolExecutor(10) as threads:
        first = threads.submit(combiner.call, 0)
        eventually(lambda: act.groups)
        others = [threads.submit(combiner.call, number) for number in range(1, 10)]
        eventually(lambda: len(combiner._waiting) == 10)
        act.go.set()
        assert first.result(PATIENCE) == 0
        assert [other.result(PATIENCE) for other in others] == [2 * number for number in range(1, 10)]
    assert [len(group) for group in act.groups] == [1, 4, 4, 1]


def test_a_call_that_fails_does_not_fail_the_others_of_its_group() -> None:
    act = Doubler()
    combiner: Combiner[int, int] = Combiner(act, 100)
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(combiner.call, 0)
        eventually(lambda: act.groups)
        good, bad = threads.submit(combiner.call, 5), threads.submit(combiner.call, 13)
        eventually(lambda: len(combiner._waiting) == 3)
        act.go.set()
        assert first.result(PATIENCE) == 0
        assert good.result(PATIENCE) == 10
        with pytest.raises(ValueError, match="13 cannot be doubled"):
            bad.result(PATIENCE)
    assert combiner.call(6) == 12


def test_an_error_that_would_be_that_of_every_call_is_given_to_all_at_once() -> None:
    """While the database is away, a hundred callers must not wait for a hundred timeouts."""
    act = Doubler()
    combiner: Combiner[int, int] = Combiner(act, 100, lambda error: isinstance(error, ValueError))
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(combiner.call, 0)
        eventually(lambda: act.groups)
        others = [threads.submit(combiner.call, number) for number in (5, 13)]
        eventually(lambda: len(combiner._waiting) == 3)
        act.go.set()
        assert first.result(PATIENCE) == 0
        for other in others:
            with pytest.raises(ValueError, match="13 cannot be doubled"):
                other.result(PATIENCE)
    assert len(act.groups) == 2


def test_a_call_that_is_repeated_alone_does_not_wait_for_the_rest_of_its_group() -> None:
    go = [threading.Event() for _ in range(4)]

    def act(numbers: Sequence[int]) -> list[int]:
        if len(numbers) > 1:
            raise ValueError("one by one")
        assert go[numbers[0]].wait(PATIENCE)
        return list(numbers)

    combiner: Combiner[int, int] = Combiner(act, 100)
    with ThreadPoolExecutor(4) as threads:
        calls = []
        for number in range(4):
            calls.append(threads.submit(combiner.call, number))
            eventually(lambda: len(combiner._waiting) == len(calls))
        for number in range(3):
            go[number].set()
        try:
            assert calls[2].result(10) == 2
        finally:
            go[3].set()
        assert [call.result(PATIENCE) for call in calls] == [0, 1, 2, 3]


def test_a_thread_that_is_interrupted_leaves_nobody_waiting() -> None:
    """Ctrl-C reaches the thread that carries the calls of others out."""
    entered = threading.Event()
    go = threading.Event()

    def act(numbers: Sequence[int]) -> list[int]:
        if numbers == [0]:
            entered.set()
            assert go.wait(PATIENCE)
            raise KeyboardInterrupt
        return list(numbers)

    combiner = Combiner(act, 100)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(combiner.call, 0)
        assert entered.wait(PATIENCE)
        second = threads.submit(combiner.call, 1)
        eventually(lambda: len(combiner._waiting) == 2)
        go.set()
        with pytest.raises(KeyboardInterrupt):
            first.result(PATIENCE)
        assert second.result(PATIENCE) == 1
    assert combiner.call(2) == 2


class Signalled(Exception):  # noqa: N818 - raised by a signal, like the errors of timeouts
    """What the handler of a signal raises."""


@pytest.fixture
def handler() -> Iterator[None]:
    def handle(*_: object) -> None:
        raise Signalled

    before = signal.signal(signal.SIGUSR1, handle)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("handler")
def test_what_a_signal_raises_reaches_the_main_thread_and_no_other_caller() -> None:
    signalled, go = threading.Event(), threading.Event()

    def act(numbers: Sequence[int]) -> list[int]:
        if 0 in numbers:
            assert go.wait(PATIENCE)
        if 1 in numbers and not signalled.is_set():
            signalled.set()
            signal.raise_signal(signal.SIGUSR1)
        return list(numbers)

    combiner: Combiner[int, int] = Combiner(act, 100)
    others: list[Future[int]] = []

    def come_behind() -> None:
        eventually(lambda: len(combiner._waiting) == 2)
        others.append(threads.submit(combiner.call, 2))
        eventually(lambda: len(combiner._waiting) == 3)
        go.set()

    with ThreadPoolExecutor(3) as threads:
        others.append(threads.submit(combiner.call, 0))
        eventually(lambda: combiner._waiting)
        behind = threads.submit(come_behind)
        with pytest.raises(Signalled):
            combiner.call(1)
        behind.result(PATIENCE)
        assert [other.result(PATIENCE) for other in others] == [0, 2]


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupted_caller_waits_only_for_a_call_that_has_begun(begun: bool) -> None:
    go, ended = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def act(numbers: Sequence[int]) -> list[int]:
        if 0 in numbers:
            assert go.wait(PATIENCE)
        if 2 in numbers:
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0.3)
            ended.set()
        return list(numbers)

    combiner: Combiner[int, int] = Combiner(act, 100)

    def interrupt() -> None:
        eventually(lambda: len(combiner._waiting) == 2 + begun)
        if begun:
            go.set()  # for the group of 1, which leads, and 2
        else:
            signal.pthread_kill(main, signal.SIGUSR1)

    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(combiner.call, 0)]
        eventually(lambda: combiner._waiting)
        if begun:
            others.append(threads.submit(combiner.call, 1))
            eventually(lambda: len(combiner._waiting) == 2)
        threads.submit(interrupt)
        start = time.monotonic()
        try:
            with pytest.raises(Signalled):
                combiner.call(2)
        finally:
            go.set()
        assert ended.is_set() is begun
        assert time.monotonic() - start < module.SECONDS / 2
        assert [other.result(PATIENCE) for other in others] == [0, 1][: len(others)]


@pytest.mark.parametrize("leads", [True, False])
def test_an_interrupt_at_any_line_leaves_nobody_waiting(leads: bool) -> None:
    line = 0
    while interrupted(line, leads=leads):
        line += 1
    assert line > 15


def interrupted(line: int, *, leads: bool) -> bool:
    """Interrupt a caller at its `line`-th line in the combiner, and check all others. Returns whether it had so many.
    With `leads`, it comes first; otherwise it waits for its turn to lead."""
    entered, go = threading.Event(), threading.Event()

    def act(numbers: Sequence[int]) -> list[int]:
        if 0 in numbers:
            entered.set()
            assert go.wait(PATIENCE)
        return list(numbers)

    combiner: Combiner[int, int] = Combiner(act, 2)

    def call(number: int) -> int:
        if number == (0 if leads else 1):
            sys.settrace(at_line(line))
        try:
            return combiner.call(number)
        finally:
            sys.settrace(None)

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(call, 0)]
        if not leads:
            assert entered.wait(PATIENCE)
            calls.append(threads.submit(call, 1))
        victim = calls[-1]
        soon(lambda: victim.done() or len(combiner._waiting) == len(calls))
        calls += [threads.submit(call, number) for number in range(len(calls), 4)]
        soon(lambda: len(combiner._waiting) >= 3 or (victim.done() and leads))
        go.set()
        others = [number for number in range(4) if calls[number] is not victim]
        assert [calls[number].result(PATIENCE) for number in others] == others
        assert threads.submit(combiner.call, 9).result(PATIENCE) == 9
        assert not combiner._waiting
        return isinstance(victim.exception(PATIENCE), KeyboardInterrupt)


def at_line(line: int) -> Callable[[FrameType, str, Any], Any]:
    """Return a function for `sys.settrace` that interrupts its thread at the `line`-th line in the combiner."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        # Between a lock and the block that releases it, Python delivers no signal.
        if event == "line" and not linecache.getline(module.__file__, frame.f_lineno).strip().startswith("with self"):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    return trace


def soon(condition: Callable[[], object]) -> None:
    """Wait until it holds, and look often."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
