"""Calls that threads make at the same time are carried out together."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

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
        eventually(lambda: len(combiner._waiting) == 9)
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
        eventually(lambda: len(combiner._waiting) == 2)
        act.go.set()
        assert first.result(PATIENCE) == 0
        assert good.result(PATIENCE) == 10
        with pytest.raises(ValueError, match="13 cannot be doubled"):
            bad.result(PATIENCE)
    assert combiner.call(6) == 12


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
        eventually(lambda: combiner._waiting)
        go.set()
        with pytest.raises(KeyboardInterrupt):
            first.result(PATIENCE)
        assert second.result(PATIENCE) == 1
    assert combiner.call(2) == 2
