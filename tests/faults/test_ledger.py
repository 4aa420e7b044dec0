"""What the ledger guarantees under faults: each job gets one result, all jobs of a batch run in the same image, no job
waits while a worker could run it, and no worker tries a job that it cannot run."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import docker
import pytest
from sqlalchemy import text

from evalpool.api import jobs as submission
from evalpool.api.connections import fleet as reported
from evalpool.api.handles import BatchHandle, Job
from evalpool.schemas import Verdict
from evalpool.schemas.settings import Settings
from evalpool.schemas.verdict import TWIN
from tests.conftest import PATIENCE, ROOT, WorkerProcess, missing
from tests.faults.fleet import Fleet, an_hour_ahead
from tests.faults.images import Tag, moving_tag
from tests.faults.jobs import Known, alike, quick, sleepers
from tests.faults.proxy import Proxy
from tests.faults.servers import Dockerd

BOTH = pytest.mark.parametrize("ledger", ["sqlite", "postgresql"], indirect=True)
POSTGRES = pytest.mark.parametrize("ledger", ["postgresql"], indirect=True)
IMAGE = Settings.model_fields["image"].default
NO_LOOKS = {"EVALPOOL_RECONCILE_SECONDS": "600"}
"""A worker polls once, when it starts; after that, it depends on wake-ups."""
SAMPLES = 4


def states(fleet: Fleet, batch: BatchHandle) -> Counter[str]:
    """How many jobs of a batch are in which state, according to the rows."""
    query = text("SELECT state, count(*) FROM jobs WHERE batch_id = :batch_id GROUP BY state")
    with fleet.store.database.read() as db:
        return Counter({row[0]: row[1] for row in db.execute(query, {"batch_id": batch.id})})


def workers_of(fleet: Fleet, batch: BatchHandle) -> Counter[int]:
    """How many of its jobs each worker has run, by pid."""
    names = [result.worker or "" for result in fleet.store.batch_results(batch.id) if result.shared_with is None]
    return Counter(int(name.rpartition("-")[2]) for name in names if name)


def wait_alive(fleet: Fleet, *workers: WorkerProcess) -> None:
    """Wait until these workers have written a heartbeat and submissions see it."""

    def told() -> bool:
        names = {member.name.rpartition("-")[2] for member in reported().members}
        return {str(worker.pid) for worker in workers} <= names

    fleet.wait_until("they report", told)


# -- identical jobs ----------------------------------------------------------------------------------------------------


@BOTH
def test_twins_of_leaders_whose_worker_is_killed_get_their_results(fleet: Fleet) -> None:
    first = fleet.start()
    batch = fleet.submit(alike(sleepers(10, 0.4), SAMPLES), dedup=True)
    assert states(fleet, batch)[TWIN] == 10 * (SAMPLES - 1)
    fleet.wait_until("leaders run", lambda: fleet.store.progress(batch.id).running >= 2)
    first.stop(signal.SIGKILL)
    fleet.start()
    fleet.finish()
    results = fleet.store.batch_results(batch.id)
    assert Counter(result.shared_with is None for result in results) == {True: 10, False: 10 * (SAMPLES - 1)}


@BOTH
def test_a_twin_runs_if_its_leader_is_cancelled_while_it_waits(fleet: Fleet) -> None:
    """A busy worker finds the new leader without polling."""
    fleet.start(**NO_LOOKS)
    fleet.submit(sleepers(4, 1))
    batch = fleet.submit(alike(quick(10), SAMPLES), dedup=True)
    leaders = fleet.ids(batch)[::SAMPLES]
    fleet.allow(Verdict.CANCELLED, of=leaders[::2])
    for leader in leaders[::2]:
        Job(leader).cancel()
    fleet.finish()
    cancelled = fleet.store.progress(batch.id).verdicts.get(Verdict.CANCELLED, 0)
    assert 0 < cancelled <= 5  # one that had just begun may have been quicker
    assert set(fleet.attempts(batch).values()) == {0, 1}


@BOTH
def test_a_twin_runs_if_its_leader_is_cancelled_while_it_runs(fleet: Fleet) -> None:
    fleet.start(**NO_LOOKS)
    batch = fleet.submit(alike(sleepers(2, 3), SAMPLES), dedup=True)
    leaders = fleet.ids(batch)[::SAMPLES]
    fleet.wait_until("the leaders run", lambda: fleet.store.progress(batch.id).running == 2)
    fleet.allow(Verdict.CANCELLED, of=leaders)
    for leader in leaders:
        Job(leader).cancel()
    fleet.finish()
    assert fleet.store.progress(batch.id).verdicts == {Verdict.CANCELLED: 2, Verdict.PASSED: 2 * (SAMPLES - 1)}
    assert sorted(fleet.attempts(batch).values()) == [0] * 2 * (SAMPLES - 2) + [1] * 4  # the leaders and their heirs


@BOTH
def test_cancelling_a_leader_wakes_an_idle_worker_for_its_twin(fleet: Fleet) -> None:
    """No worker can read the leader, so all workers are idle when it is cancelled."""
    batch = fleet.submit(alike(quick(1), SAMPLES), dedup=True)
    leader = fleet.ids(batch)[0]
    fleet.sql("UPDATE jobs SET spec = :spec WHERE id = :id", spec='{"field_of_the_future": 1}', id=leader)
    fleet.start(**NO_LOOKS)
    fleet.submit(quick(1))
    fleet.wait_done(1)
    fleet.wait_until("it sleeps", lambda: not fleet.broker.waiting() and not fleet.broker.unacked())
    fleet.allow(Verdict.CANCELLED, of=[leader])
    Job(leader).cancel()
    fleet.finish()
    assert fleet.store.progress(batch.id).verdicts == {Verdict.CANCELLED: 1, Verdict.PASSED: SAMPLES - 1}


@BOTH
def test_a_twin_runs_if_its_leader_has_used_up_its_attempts(fleet: Fleet) -> None:
    fleet.env["EVALPOOL_MAX_ATTEMPTS"] = "1"
    first = fleet.start()
    batch = fleet.submit(alike(sleepers(6, 0.5), SAMPLES), dedup=True)
    fleet.wait_until("leaders run", lambda: fleet.store.progress(batch.id).running >= 2)
    first.stop(signal.SIGKILL)
    fleet.allow(Verdict.SANDBOX_ERROR, of=fleet.ids(batch)[::SAMPLES])
    fleet.start()
    fleet.finish()
    verdicts = fleet.store.progress(batch.id).verdicts
    assert verdicts[Verdict.SANDBOX_ERROR] >= 2
    assert verdicts[Verdict.PASSED] + verdicts[Verdict.SANDBOX_ERROR] == 6 * SAMPLES


# -- last attempts -----------------------------------------------------------------------------------------------------


@BOTH
def test_jobs_whose_last_attempt_expires_under_three_reconcilers_get_one_result_each(fleet: Fleet) -> None:
    """Three workers look for expired leases ten times a second. Two of them are frozen for about as long as a lease
    lasts, so that they commit while the others end their jobs, and are then killed."""
    fleet.env |= {"EVALPOOL_MAX_ATTEMPTS": "1", "EVALPOOL_RECONCILE_SECONDS": "0.1", "EVALPOOL_LEASE_SECONDS": "1"}
    for _ in range(3):
        fleet.start(ready=False)
    for worker in fleet.workers:
        worker.wait_ready()
    batch = fleet.submit(sleepers(90, 0.15))
    fleet.allow(Verdict.SANDBOX_ERROR, of=fleet.ids(batch))
    for worker, done in zip(fleet.workers[:2], (10, 30), strict=True):
        fleet.wait_done(done)
        worker.process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        worker.process.send_signal(signal.SIGCONT)
        fleet.wait_done(done + 10)
        worker.stop(signal.SIGKILL)
    fleet.finish()
    given_up = [result for result in fleet.store.batch_results(batch.id) if result.verdict is Verdict.SANDBOX_ERROR]
    assert given_up
    assert {result.detail for result in given_up} == {"worker lost: its lease expired in the last of 1 attempts"}
    assert set(fleet.attempts(batch).values()) == {1}


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tag(engine_client: docker.DockerClient) -> Iterator[Tag]:
    """A tag on the first of two images, which have no other tag."""
    with moving_tag(engine_client, IMAGE) as made:
        yield made


def digests(fleet: Fleet, batch: BatchHandle) -> set[str | None]:
    return {result.image_digest for result in fleet.store.batch_results(batch.id)}


@BOTH
def test_moving_a_tag_during_a_run_changes_the_image_of_no_job(fleet: Fleet, tag: Tag) -> None:
    """The image is pinned at submission. A batch that is submitted later gets the other image."""
    first = fleet.start(EVALPOOL_MAX_USES="5")
    wait_alive(fleet, first)
    fleet.wait_until("the image is reported", lambda: reported().has(tag.name))
    batch = fleet.submit(sleepers(40, 0.2, image=tag.name))
    _move_in_mid_run(fleet, tag, first)
    fleet.wait_until("the move is reported", lambda: reported().pin(tag.name) == f"{tag.name} {tag.images[1]}")
    later = fleet.submit(quick(5, image=tag.name))
    fleet.finish()
    assert (digests(fleet, batch), digests(fleet, later)) == ({tag.images[0]}, {tag.images[1]})
    assert len(workers_of(fleet, batch)) == 2


@BOTH
def test_moving_a_tag_changes_no_job_of_a_batch_that_was_submitted_before_any_worker_started(
    fleet: Fleet, tag: Tag
) -> None:
    """The first claim pins the image for every worker."""
    batch = fleet.submit(sleepers(40, 0.2, image=tag.name))
    _move_in_mid_run(fleet, tag, fleet.start(EVALPOOL_MAX_USES="5"))
    fleet.finish()
    assert digests(fleet, batch) == {tag.images[0]}
    assert len(workers_of(fleet, batch)) == 2


def _move_in_mid_run(fleet: Fleet, tag: Tag, first: WorkerProcess) -> None:
    """The first worker continues for a while with new sandboxes. The rest is run by a worker that has seen the tag only
    after it was moved."""
    fleet.wait_done(6)
    tag.move(1)
    fleet.wait_done(18)
    assert first.stop(signal.SIGTERM) == 0
    assert fleet.done() < 40
    fleet.start(EVALPOOL_MAX_USES="5")
    fleet.wait_done()


def test_jobs_wait_for_a_worker_that_has_their_image_and_no_other_worker_tries_them(
    fleet: Fleet, dockerd: Dockerd, tag: Tag
) -> None:
    """First there is only a worker without the image. Then one with the image starts, and is busy at first."""
    without = fleet.start(DOCKER_HOST=dockerd.host)
    wait_alive(fleet, without)
    alone = fleet.submit(quick(10, image=tag.name))
    fleet.submit(quick(10))
    fleet.wait_done(10)
    fleet.wait_until("it says so", lambda: "image_absent" in without.log.read_text())
    fleet.wait_until("nothing is in its hands", lambda: not fleet.store.progress(alone.id).running)
    assert set(fleet.attempts(alone).values()) == {0}
    assert f"10 jobs wait for the image {tag.name}, which no worker has" in _status(alone)

    having = fleet.start(ready=False)
    having.wait_ready()
    wait_alive(fleet, having)
    fleet.wait_done()
    fleet.submit(sleepers(8, 1))
    busy = fleet.submit(quick(20, image=tag.name))
    fleet.finish()
    for batch in (alone, busy):
        assert set(workers_of(fleet, batch)) == {having.pid}
        assert set(fleet.attempts(batch).values()) == {1}


def test_removing_an_image_while_its_jobs_wait_costs_no_attempts(fleet: Fleet, tag: Tag) -> None:
    worker = fleet.start()
    fleet.wait_until("the image is reported", lambda: reported().has(tag.name))
    busy = fleet.submit(sleepers(2, 6))
    fleet.wait_until("it is busy", lambda: fleet.store.progress(busy.id).running == 2)
    batch = fleet.submit(quick(5, image=tag.name))
    tag.client.api.remove_image(tag.name, force=True)
    fleet.submit(quick(5))
    fleet.wait_done(2 + 5)
    fleet.wait_until("it says so", lambda: "image_absent" in worker.log.read_text())
    fleet.wait_until("nothing is in its hands", lambda: not fleet.store.progress(batch.id).running)
    assert set(fleet.attempts(batch).values()) == {0}
    fleet.wait_until("so does the status", lambda: f"5 jobs wait for the image {tag.name}" in _status(batch))
    fleet.cancel(batch)
    fleet.finish()
    assert fleet.store.progress(batch.id).cancelled == 5


def _status(batch: BatchHandle) -> str:
    command = [sys.executable, "-m", "evalpool", "status", batch.id]
    said = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=True)
    return " ".join(said.stdout.split())


# -- two versions ------------------------------------------------------------------------------------------------------


@BOTH
def test_jobs_of_a_newer_version_wait_untried_and_other_jobs_are_not_affected(fleet: Fleet) -> None:
    batch = fleet.submit(quick(60))
    ids = fleet.ids(batch)
    future = ids[::7]
    fleet.sql(
        """UPDATE jobs SET spec = replace(spec, '{"code"', '{"field_of_the_future":"x","code"')
        WHERE batch_id = :batch_id AND seq % 7 = 0""",
        batch_id=batch.id,
    )
    worker = fleet.start()
    fleet.start()
    fleet.wait_done(60 - len(future))
    fleet.wait_until("nothing is in their hands", lambda: not fleet.store.progress(batch.id).running)
    assert {each: attempt for each, attempt in fleet.attempts(batch).items() if attempt != 1} == dict.fromkeys(
        future, 0
    )
    assert states(fleet, batch) == {"queued": len(future), "finished": 60 - len(future)}
    assert any("field_of_the_future" in each.log.read_text() for each in fleet.workers)
    assert "for a worker with a newer version of evalpool" in _status(batch)
    assert worker.process.poll() is None
    fleet.sql("""UPDATE jobs SET spec = replace(spec, '"field_of_the_future":"x",', ''), lease_until = NULL
        WHERE state = 'queued'""")
    fleet.finish()
    assert set(fleet.attempts(batch).values()) == {1}


# -- wake-ups ----------------------------------------------------------------------------------------------------------


@POSTGRES
def test_each_of_a_thousand_consecutive_single_jobs_wakes_the_worker(fleet: Fleet) -> None:
    fleet.start(**NO_LOOKS)
    for known in quick(1000):
        assert fleet.submit_one(known).result(timeout=PATIENCE).passed
    fleet.finish()


@BOTH
def test_single_jobs_from_many_threads_wake_the_workers(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.start(ready=False, **NO_LOOKS)
    for worker in fleet.workers:
        worker.wait_ready()
    raised: list[BaseException] = []

    def submit() -> None:
        try:
            for known in quick(50):
                assert fleet.submit_one(known).result(timeout=PATIENCE).passed
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    fleet.finish()


@BOTH
def test_a_worker_that_is_told_to_stop_passes_its_wake_ups_on(fleet: Fleet) -> None:
    """They reach an idle worker and one that just starts. Neither polls after its start."""
    first = fleet.start(**NO_LOOKS)
    fleet.wait_done(0)
    second = fleet.start(**NO_LOOKS)
    batch = fleet.submit(sleepers(300, 0.03))
    fleet.wait_done(30)
    third = fleet.start(ready=False, **NO_LOOKS)
    assert first.stop(signal.SIGTERM) == 0
    fleet.wait_done(100)
    third.wait_ready()
    assert second.stop(signal.SIGTERM) == 0
    fleet.finish()
    assert set(fleet.attempts(batch).values()) == {1}


@BOTH
def test_long_jobs_are_shared_by_workers_of_one_slot_each(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.start(ready=False, EVALPOOL_SLOTS="1", **NO_LOOKS)
    for worker in fleet.workers:
        worker.wait_ready()
    batch = fleet.submit(sleepers(10, 2))
    fleet.finish()
    shares = workers_of(fleet, batch)
    assert min(shares[worker.pid] for worker in fleet.workers) >= 3, shares
    assert set(fleet.attempts(batch).values()) == {1}


def test_jobs_whose_sandboxes_take_long_to_make_are_run_all_the_same(
    fleet: Fleet, engine_link: Proxy, tag: Tag
) -> None:
    """Longer than a job may wait for its turn in a worker: it must not be sent from one to the other for ever."""
    for _ in range(2):
        fleet.start(ready=False, DOCKER_HOST=engine_link.url)
    for worker in fleet.workers:
        worker.wait_ready()
    engine_link.late = (b"/containers/create", 2.5)
    batch = fleet.submit(quick(12, image=tag.name))
    fleet.finish()
    assert set(fleet.attempts(batch).values()) == {1}


# -- streams -----------------------------------------------------------------------------------------------------------


@BOTH
def test_a_stream_that_another_process_has_cancelled_stays_cancelled(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that are added later end at once, and a resumed stream is still cancelled."""
    monkeypatch.setattr(submission, "PART", 50)
    fleet.start()
    jobs = sleepers(300, 0.05)

    def reading() -> Iterator[Known]:
        for place, known in enumerate(jobs):
            if place == 120:  # the first hundred are stored, the next twenty are read
                fleet.wait_done(10)
                with fleet.store.database.read() as db:
                    batch_id = db.execute(text("SELECT id FROM batches")).scalar_one()
                command = [sys.executable, "-m", "evalpool", "cancel", batch_id]
                subprocess.run(command, cwd=ROOT, env=dict(os.environ), check=True, capture_output=True)
            yield known

    def submit() -> BatchHandle:
        return submission.submit_stream((known.spec for known in reading()), len(jobs), idempotency_key="stream")

    fleet.expected["soon"] = jobs  # so that there is something to wait for
    batch = submit()
    fleet.expected = {batch.id: jobs}
    fleet.allow(Verdict.CANCELLED, of=fleet.ids(batch))
    fleet.wait_done()
    assert submit().id == batch.id
    fleet.finish()
    attempts = fleet.attempts(batch)
    assert {attempts[each] for each in fleet.ids(batch)[100:]} == {0}
    assert fleet.store.progress(batch.id).cancelled >= 200


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_a_worker_whose_clock_is_an_hour_ahead_takes_no_lease_from_another(fleet: Fleet) -> None:
    """SQLite has no clock of its own. The other worker's leases must not seem expired, and this one's must expire."""
    ahead = an_hour_ahead()
    if ahead is None:
        missing("no faketime here: apt-get install faketime")
    assert ahead is not None
    # Leases that do not run out because the machine is slow: an hour is still more than that.
    fleet.env |= {"EVALPOOL_RECONCILE_SECONDS": "0.1", "EVALPOOL_LEASE_SECONDS": "15"}
    right = fleet.start(EVALPOOL_SLOTS="1")
    wrong = fleet.start(EVALPOOL_SLOTS="1", **ahead)
    batch = fleet.submit(sleepers(12, 1))
    fleet.wait_done()
    assert set(fleet.attempts(batch).values()) == {1}
    assert set(workers_of(fleet, batch)) == {right.pid, wrong.pid}
    again = fleet.submit(sleepers(8, 1))
    fleet.wait_until("both run", lambda: fleet.store.progress(again.id).running == 2)
    for box in fleet.boxes(wrong):  # why they died is asked of the engine, which has a clock of its own
        fleet.engine.api.remove_container(box, force=True)
    fleet.wait_done()
    last = fleet.submit(sleepers(8, 1))
    fleet.wait_until("both run", lambda: fleet.store.progress(last.id).running == 2)
    wrong.stop(signal.SIGKILL)
    fleet.wait_done()
    fleet.forget_messages_of_the_future()
    fleet.finish()
    for result in fleet.store.batch_results(batch.id):
        assert abs(result.finished_at.timestamp() - time.time()) < 600
