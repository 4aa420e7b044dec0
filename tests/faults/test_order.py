"""The order of jobs: priorities, and the fair share of batches."""

from tests.conftest import PATIENCE
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
    fleet.cancel(bulk)
    fleet.finish()


def test_a_small_batch_does_not_wait_for_a_big_one(fleet: Fleet) -> None:
    fleet.start()
    big = fleet.submit(quick(1000))
    fleet.wait_done(20)
    small = fleet.submit(quick(10))
    small.wait(timeout=60)
    assert big.progress().done < 500
    fleet.cancel(big)
    fleet.finish()


def test_low_is_not_starved_by_high(fleet: Fleet) -> None:
    """More high jobs wait than a worker claims at once, and yet low jobs get their turn: after about a thousand high
    jobs, and before the rest of them."""
    fleet.start()
    high = fleet.submit(quick(1400, priority="high"))
    low = fleet.submit(quick(1, priority="low"))
    low.wait(timeout=PATIENCE)
    fleet.cancel(high)
    fleet.finish()
    with fleet.store.database.read() as db:
        overtaken = db.exec_driver_sql(
            "SELECT count(*) FROM jobs high, jobs low WHERE high.priority = 'high' AND low.priority = 'low' "
            "AND high.created_at < low.started_at AND coalesce(high.started_at, low.started_at + 1) > low.started_at"
        ).scalar_one()
    assert overtaken > 0
