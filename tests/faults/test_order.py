"""Who goes first: priorities, and batches that share."""

import threading
import time

from api.handles import BatchHandle
from tests.faults.fleet import Fleet
from tests.faults.jobs import quick, sleepers


def test_a_high_job_overtakes_three_hundred_normal_ones(fleet: Fleet) -> None:
    fleet.start()
    bulk = fleet.submit(sleepers(300, 0.02))
    fleet.wait_done(10)
    before = bulk.progress().done
    urgent = fleet.submit(quick(1, priority="high"))
    urgent.wait(timeout=60)
    assert bulk.progress().done < before + 100  # what was in hand when it came, and not much more
    fleet.finish()


def test_a_small_batch_does_not_wait_for_a_big_one(fleet: Fleet) -> None:
    fleet.start()
    big = fleet.submit(quick(1000))
    fleet.wait_done(20)
    small = fleet.submit(quick(10))
    small.wait(timeout=60)
    assert big.progress().done < 500
    fleet.finish()


def test_low_is_not_starved_by_a_stream_of_high(fleet: Fleet) -> None:
    """There is always a high job waiting, and yet the low ones are done before the stream has ended."""
    fleet.start()
    over = threading.Event()
    first = fleet.submit(sleepers(40, 0.05, priority="high"))
    low = fleet.submit(quick(5, priority="low"))
    stream: list[BatchHandle] = [first]

    def keep_coming() -> None:
        while not over.is_set():
            if sum(each.progress().queued for each in stream[-3:]) < 20:
                stream.append(fleet.submit(sleepers(20, 0.05, priority="high")))
            time.sleep(0.05)

    thread = threading.Thread(target=keep_coming)
    thread.start()
    try:
        low.wait(timeout=60)
        waiting = sum(each.progress().queued for each in stream[-3:])
    finally:
        over.set()
        thread.join()
    assert waiting  # they were served although others with more right were there
    fleet.finish()
