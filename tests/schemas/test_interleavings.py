"""Every job ends with one result in any order of events: random steps of submitters, workers, cancellers and
reconcilers, each of them checked against the rows before it."""

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from evalpool.schemas import JobSpec, Priority, State, Verdict, dedup, rows
from evalpool.schemas import store as module
from evalpool.schemas.audit import audit
from evalpool.schemas.lease import Lease
from evalpool.schemas.store import Store
from evalpool.schemas.verdict import HELD, WAITING
from tests.schemas.test_recovery import at_once
from tests.schemas.test_store import result

WORKERS = ["w1", "w2"]
PROGRAMS = "ab"
"""There are few, so that identical jobs are frequent."""
VERDICTS = [Verdict.PASSED, Verdict.WRONG_ANSWER, Verdict.SANDBOX_ERROR, Verdict.CANCELLED]
LONG = 100_000.0
"""More seconds than a test takes, so that a lease expires only when a step makes it expire."""
FUTURE = """{"code": "x", "field_of_the_future": 1}"""
FINAL = (State.FINISHED, State.CANCELLED)
ROWS = """
    SELECT j.id, j.batch_id, j.state, j.attempt, j.worker, j.lease_until, j.cancelled_at, j.rank, j.image, j.spec,
    r.verdict, r.shared_with FROM jobs j LEFT JOIN results r ON r.job_id = j.id ORDER BY j.id
"""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the sizes, so that a few jobs do what usually takes thousands."""
    monkeypatch.setattr(module, "WHOLE", 3)
    monkeypatch.setattr(module, "PART", 2)
    monkeypatch.setattr(module, "ABANDONED_SECONDS", -1)
    monkeypatch.setattr(rows, "IDS_AT_ONCE", 3)


class CutOff(Exception):  # noqa: N818 - it is not an error
    """Stands for the death of the process."""


@dataclass
class Feeder:
    """A process that submits a stream from its `first`-th job on. It knows only the leaders it has seen itself."""

    first: int
    turn: float
    place: int
    seen: dict[str, str] = field(default_factory=dict)


@dataclass
class Submission:
    """The content of a batch, so that another process can resume its submission."""

    specs: list[JobSpec]
    alike: bool
    """Whether identical jobs share a result."""
    feeders: list[Feeder] = field(default_factory=list)

    @property
    def images(self) -> list[str]:
        return [f"{spec.code}:1" for spec in self.specs]

    @property
    def digests(self) -> list[str]:
        return [spec.digest("image") for spec in self.specs]


def table(db: Connection) -> dict[str, Any]:
    return {row.id: row for row in db.execute(text(ROWS))}


def some_specs(codes: list[str], priority: Priority) -> list[JobSpec]:
    return [JobSpec(code=code, sample_id=place, priority=priority) for place, code in enumerate(codes)]


MANY = [str(number) for number in range(40)]
"""There are enough of them that leaders, twins and jobs that are neither are mixed in a batch."""
ATTEMPTS = 3
STEPS = 150
"""Steps of each thread."""
CODES = st.lists(st.sampled_from(PROGRAMS), min_size=1, max_size=6)
ALIKE = st.sampled_from([True, True, False])
FEW = 6
"""No more jobs are submitted while so many are open, so that most steps are about the same jobs."""
PRIORITIES = st.sampled_from(Priority)


class Interleaving(RuleBasedStateMachine):
    """Takes one step at a time, and compares the rows after it with the rows before it."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = Store(store.database)
        self.submissions: dict[str, Submission] = {}
        self.given: list[tuple[str, Lease]] = []
        """Every lease that a worker got and did not put back, with the worker."""
        self.holders: dict[str, tuple[str, int]] = {}
        self.verdicts: dict[str, Verdict] = {}
        """The first verdict of each job that has one."""
        self.open = 0
        """How many jobs have no result."""
        self.sound = True
        """Whether the latest step succeeded. After a failed step, draining would only hide the failure."""
        with store.database.write() as db:
            for name in ("cases", "results", "tallies", "jobs", "batches"):
                db.execute(text(f"DELETE FROM {name}"))
            db.execute(text("UPDATE turns SET value = 0"))

    # -- helpers -----------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[dict[str, Any]]:
        """Take a step; yields the rows before it."""
        self.sound = False
        yield self.rows()
        self.sound = True

    def rows(self) -> dict[str, Any]:
        with self.store.database.read() as db:
            return table(db)

    def sql(self, command: str, **values: Any) -> None:
        with self.store.database.write() as db:
            db.execute(text(command), values)

    def ended_since(self, before: dict[str, Any]) -> set[str]:
        ended = {job_id for job_id, row in before.items() if row.verdict}
        return {job_id for job_id, row in self.rows().items() if row.verdict} - ended

    @contextmanager
    def cut_off(self, after: int | None) -> Iterator[None]:
        """Let the process die after so many transactions; with `None`, it does not die."""
        database, left = self.store.database, [after]
        write = type(database).write

        @contextmanager
        def counted() -> Iterator[Connection]:
            if left[0] is not None:
                if left[0] == 0:
                    raise CutOff
                left[0] -= 1
            with write(database) as db:
                yield db

        database.write = counted  # type: ignore[method-assign]
        try:
            with suppress(CutOff):
                yield
        finally:
            del database.write

    # -- submission --------------------------------------------------------------------------------

    @initialize(max_attempts=st.sampled_from([2, 3]))
    def begin(self, max_attempts: int) -> None:
        self.max_attempts = max_attempts

    @precondition(lambda self: self.open < FEW)
    @rule(codes=CODES, priority=PRIORITIES, alike=ALIKE, after=st.none() | st.integers(1, 5))
    def submit(self, codes: list[str], priority: Priority, alike: bool, after: int | None) -> None:
        with self.step():
            batch_id = f"b{len(self.submissions):03}"
            self.submissions[batch_id] = Submission(some_specs(codes, priority), alike)
            self._submit(batch_id, after)

    def _submit(self, batch_id: str, after: int | None) -> None:
        batch = self.submissions[batch_id]
        digests = batch.digests if batch.alike else None
        with self.cut_off(after):
            stored = self.store.add_batch(batch_id, batch.specs, None, batch_id, digests, batch.images)
            assert stored == batch_id
            self.store.fill(batch_id, batch.specs, digests, batch.images)

    @precondition(lambda self: any(not batch.feeders for batch in self.submissions.values()))
    @rule(data=st.data(), after=st.none() | st.integers(1, 5))
    def submit_again(self, data: st.DataObject, after: int | None) -> None:
        with self.step():
            whole = [batch_id for batch_id, batch in self.submissions.items() if not batch.feeders]
            batch_id = data.draw(st.sampled_from(whole))
            self._submit(batch_id, after)

    @precondition(lambda self: self.open < FEW)
    @rule(codes=CODES, priority=PRIORITIES, alike=ALIKE)
    def open_stream(self, codes: list[str], priority: Priority, alike: bool) -> None:
        with self.step():
            batch_id = f"b{len(self.submissions):03}"
            self.submissions[batch_id] = Submission(some_specs(codes, priority), alike)
            self._feeder(batch_id)

    @precondition(lambda self: self.streams())
    @rule(data=st.data())
    def take_up_stream(self, data: st.DataObject) -> None:
        """Resume a stream. The first process may be dead or alive."""
        with self.step():
            self._feeder(data.draw(st.sampled_from(self.streams())))

    def _feeder(self, batch_id: str) -> None:
        batch = self.submissions[batch_id]
        stored, there, turn = self.store.open_batch(batch_id, len(batch.specs), None, batch_id, {})
        assert stored == batch_id
        batch.feeders.append(Feeder(there, turn, there))

    def streams(self) -> list[str]:
        return [batch_id for batch_id, batch in self.submissions.items() if batch.feeders]

    def hungry(self) -> list[tuple[str, Feeder]]:
        """Feeders that have something left."""
        batches = self.submissions.items()
        return [
            (each, feeder) for each, batch in batches for feeder in batch.feeders if feeder.place < len(batch.specs)
        ]

    @precondition(lambda self: self.hungry())
    @rule(data=st.data(), size=st.integers(1, 3), cache=st.booleans())
    def feed(self, data: st.DataObject, size: int, cache: bool) -> None:
        with self.step() as before:
            batch_id, feeder = data.draw(st.sampled_from(self.hungry()))
            batch = self.submissions[batch_id]
            span = slice(feeder.place, feeder.place + size)
            digests, leaders = None, {}
            if batch.alike:
                digests = batch.digests[span]
                if cache:
                    feeder.seen |= self.store.known([digest for digest in digests if digest not in feeder.seen])
                leaders = dedup.find_leaders(batch_id, feeder.place, digests, feeder.seen)
            had = self.store.add_jobs(
                batch_id, feeder.place, batch.specs[span], feeder.turn, digests, leaders, batch.images[span],
                first=feeder.first,
            )  # fmt: skip
            feeder.place += len(batch.specs[span])
            assert had <= self.ended_since(before)

    # -- workers -----------------------------------------------------------------------------------

    @rule(
        worker=st.sampled_from(WORKERS),
        count=st.integers(1, 9),
        alive=st.booleans(),
        version=st.sampled_from("12"),
        without=st.sets(st.sampled_from([f"{code}:1" for code in PROGRAMS]), max_size=2),
        after=st.none() | st.just(1),
    )
    def claim(self, worker: str, count: int, alive: bool, version: str, without: set[str], after: int | None) -> None:
        with self.step() as before:
            left_alone = (worker, f"version {version}")
            free = [
                row
                for row in before.values()
                if row.state == State.QUEUED
                and row.image not in without
                and not (row.lease_until and row.worker in left_alone)
            ]
            # After one transaction, the worker dies before it has put back the jobs that it cannot read.
            with self.cut_off(after):
                claim = self.store.claim(count, worker, LONG if alive else -LONG, version=version, without=without)
                taken = {lease.job_id for lease in claim.leases} | claim.unreadable.keys()
                assert len(taken) == claim.count == min(count, len(free))
                assert taken <= {row.id for row in free}
                assert sorted(before[job_id].rank for job_id in taken) == sorted(row.rank for row in free)[:count]
                assert {before[job_id].spec for job_id in claim.unreadable} <= {FUTURE}
                for lease in claim.leases:
                    assert lease.attempt == before[lease.job_id].attempt + 1
                    self.given.append((worker, lease))
            for row in self.rows().values():
                if row.state == State.RUNNING and before[row.id].state != State.RUNNING:
                    self.holders[row.id] = (worker, row.attempt)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), verdicts=st.lists(st.sampled_from(VERDICTS), min_size=1, max_size=3))
    def record(self, data: st.DataObject, verdicts: list[Verdict]) -> None:
        """Record results for leases that are held, were lost or have a result already; some for the same job."""
        with self.step() as before:
            leases = [data.draw(st.sampled_from(self.given[-8:]))[1] for _ in verdicts]
            results = [result(lease, verdict) for lease, verdict in zip(leases, verdicts, strict=True)]
            new = self.store.record(results, data.draw(st.sampled_from(WORKERS)))
            assert new == self.ended_since(before)
            first = {each.job_id: each.verdict for each in reversed(results)}
            now = self.rows()
            assert new >= {job_id for job_id in first if before[job_id].verdict is None}
            for job_id in new:
                leader = now[job_id].shared_with
                assert Verdict(now[job_id].verdict) is (
                    first[job_id] if leader is None else Verdict(now[leader].verdict)
                )

    @precondition(lambda self: self.given)
    @rule(data=st.data(), worker=st.sampled_from(WORKERS))
    def renew(self, data: st.DataObject, worker: str) -> None:
        with self.step() as before:
            mine = [lease for holder, lease in self.given if holder == worker]
            some = data.draw(st.lists(st.sampled_from(mine), max_size=6)) if mine else []
            held = {lease.job_id: lease.attempt for lease in some}
            lost, cancelled = self.store.renew(held, worker, LONG)
            kept = {
                job_id
                for job_id, attempt in held.items()
                if (before[job_id].state, before[job_id].worker, before[job_id].attempt)
                == (State.RUNNING, worker, attempt)
            }
            over = {
                job_id
                for job_id, attempt in held.items()
                if before[job_id].state in FINAL and before[job_id].attempt == attempt
            }
            assert lost == held.keys() - kept - over
            assert cancelled == {job_id for job_id in kept if before[job_id].cancelled_at is not None}

    @precondition(lambda self: self.given)
    @rule(data=st.data(), shun=st.sampled_from([0, LONG]))
    def release(self, data: st.DataObject, shun: float) -> None:
        with self.step() as before:
            worker, lease = data.draw(st.sampled_from(self.given[-8:]))
            if lease.attempt >= self.max_attempts:
                return  # after the last attempt, a worker records a result instead
            self.store.release(lease, worker, "the container is gone", shun)
            was, now = before[lease.job_id], self.rows()[lease.job_id]
            if (was.state, was.attempt, was.worker) == (State.RUNNING, lease.attempt, worker):
                assert now.state == (State.QUEUED if was.cancelled_at is None else State.CANCELLED)
            else:
                assert now == was

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        with self.step() as before:
            holder, lease = data.draw(st.sampled_from(self.given[-8:]))
            self.store.put_back([lease], holder)
            # A worker forgets such a lease: it never records a result for it, nor puts it back again.
            self.given = [each for each in self.given if each[1] is not lease]
            was, now = before[lease.job_id], self.rows()[lease.job_id]
            if (was.state, was.worker, was.attempt) == (State.RUNNING, holder, lease.attempt):
                assert now.attempt == lease.attempt - 1
                assert now.state == (State.QUEUED if was.cancelled_at is None else State.CANCELLED)
            else:
                assert now == was

    # -- everybody else ----------------------------------------------------------------------------

    @rule(data=st.data())
    def fall_silent(self, data: st.DataObject) -> None:
        with self.step() as before:
            running = [row.id for row in before.values() if row.state == State.RUNNING]
            if running:
                late = data.draw(st.sampled_from(running))
                self.sql("UPDATE jobs SET lease_until = 0 WHERE id = :id", id=late)

    @rule(after=st.none() | st.integers(1, 2))
    def expire(self, after: int | None) -> None:
        with self.step() as before:
            late = [row for row in before.values() if row.state == State.RUNNING and row.lease_until < time.time()]
            with self.cut_off(after):
                assert self.store.expire(self.max_attempts) == len(late)
                for row in late:
                    now = self.rows()[row.id]
                    if row.cancelled_at is not None:
                        assert now.verdict == Verdict.CANCELLED
                    elif row.attempt >= self.max_attempts:
                        assert now.verdict == Verdict.SANDBOX_ERROR
                    else:
                        assert (now.state, now.attempt) == (State.QUEUED, row.attempt)

    @rule(data=st.data())
    def cancel_job(self, data: st.DataObject) -> None:
        with self.step() as before:
            job_ids = sorted(job_id for job_id, row in before.items() if row.verdict is None) or sorted(before)
            if job_ids:
                job_id = data.draw(st.sampled_from(job_ids))
                assert self.store.cancel(job_id=job_id) == len(self.ended_since(before))

    @precondition(lambda self: self.submissions)
    @rule(data=st.data(), after=st.none() | st.integers(1, 3))
    def cancel_batch(self, data: st.DataObject, after: int | None) -> None:
        with self.step() as before:
            batch_id = data.draw(st.sampled_from(sorted(self.submissions)))
            with self.cut_off(after):
                assert self.store.cancel(batch_id=batch_id) == len(self.ended_since(before))

    @rule(after=st.none() | st.integers(1, 3))
    def finish_what_is_left(self, after: int | None) -> None:
        with self.step(), self.cut_off(after):
            for batch_id in self.store.abandoned():
                self.store.finish(batch_id)
            assert self.store.abandoned() == []

    @rule(data=st.data())
    def come_from_the_future(self, data: st.DataObject) -> None:
        """Turn a waiting job into one that this version cannot read."""
        with self.step() as before:
            waiting = [row.id for row in before.values() if row.state in WAITING]
            if waiting:
                job_id = data.draw(st.sampled_from(waiting))
                self.sql("UPDATE jobs SET spec = :spec WHERE id = :id", spec=FUTURE, id=job_id)

    # -- what holds after every step ---------------------------------------------------------------

    @invariant()
    def the_rows_agree(self) -> None:
        now = self.rows()
        counted: dict[str, Counter[Verdict]] = {}
        for row in now.values():
            verdict = row.verdict and Verdict(row.verdict)
            assert (row.state in FINAL) == (verdict is not None), row
            assert row.attempt <= self.max_attempts, row
            if verdict is not None:
                assert row.state == State.after(verdict), row
                assert self.verdicts.setdefault(row.id, verdict) is verdict, row
                counted.setdefault(row.batch_id, Counter())[verdict] += 1
            elif row.state == State.RUNNING:
                assert self.holders[row.id] == (row.worker, row.attempt), row
            else:
                assert row.cancelled_at is None, f"no worker will ever claim it: {row}"
        with self.store.database.read() as db:
            results = db.execute(text("SELECT count(*) FROM results")).scalar()
            batches = db.execute(text("SELECT id, todo, cancelled_at FROM batches")).all()
        assert results == len(self.verdicts)
        self.open = len(now) - len(self.verdicts)
        for batch in batches:
            assert self.store.progress(batch.id).verdicts == counted.get(batch.id, {})
            its = [row for row in now.values() if row.batch_id == batch.id]
            if batch.todo is None:
                assert all(row.state != HELD for row in its)
            if batch.todo is None and batch.cancelled_at is not None:
                assert all(row.state in FINAL or row.cancelled_at is not None for row in its)
        assert audit(self.store, repair=False) == []

    def teardown(self) -> None:
        if self.sound and hasattr(self, "max_attempts"):
            for batch_id, batch in self.submissions.items():
                if not batch.feeders:
                    self._submit(batch_id, None)
            drain(self.store, self.max_attempts)
            self.the_rows_agree()


def drain(store: Store, max_attempts: int) -> None:
    """Expire all leases, and let a last worker run the rest. Then no job may be left."""
    for batch_id in store.abandoned():
        store.finish(batch_id)
    with store.database.write() as db:
        db.execute(text("UPDATE jobs SET lease_until = 0 WHERE lease_until IS NOT NULL"))
        db.execute(
            text("UPDATE jobs SET spec = :spec WHERE spec = :future"), {"spec": '{"code": "x"}', "future": FUTURE}
        )
    store.expire(max_attempts)
    while leases := store.claim(5, "last", LONG).leases:
        store.record([result(lease) for lease in leases], "last")
    with store.database.read() as db:
        assert [row for row in table(db).values() if row.verdict is None] == []
    assert audit(store, repair=False) == []


def test_every_job_ends_with_one_result_in_any_order_of_events(store: Store) -> None:
    run_state_machine_as_test(
        lambda: Interleaving(store),  # type: ignore[arg-type]
        settings=settings(
            max_examples=40,
            stateful_step_count=50,
            deadline=None,
            derandomize="CI" in os.environ,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow],  # a database is slow
        ),
    )


# -- all at once -----------------------------------------------------------------------------------


class Worker:
    """A worker that also submits, cancels and reconciles; each one has a thread."""

    def __init__(self, name: str, store: Store, batches: list[str], seed: int) -> None:
        self.name, self.store, self.batches, self.chance = name, Store(store.database), batches, random.Random(seed)
        self.held: list[Lease] = []
        self.claimed: Counter[tuple[str, int]] = Counter()
        self.returned: Counter[tuple[str, int]] = Counter()
        self.submitted = 0
        self.raised: list[str] = []

    def work(self, steps: int) -> None:
        often = [self.claim, self.claim, self.claim, self.record, self.record, self.record]
        acts = [*often, self.renew, self.release, self.put_back, self.expire, self.submit, self.cancel]
        for _ in range(steps):
            act = self.chance.choice(acts)
            try:
                act()
            except OperationalError as error:
                self.raised.append(f"{act.__name__}: {error}")

    def some(self) -> list[Lease]:
        return self.chance.sample(self.held, min(len(self.held), self.chance.randint(1, 20)))

    def drop(self, leases: list[Lease]) -> None:
        self.held = [lease for lease in self.held if lease not in leases]

    def claim(self) -> None:
        leases = self.store.claim(self.chance.randint(1, 20), self.name, self.chance.choice([LONG, LONG, -LONG])).leases
        self.claimed.update((lease.job_id, lease.attempt) for lease in leases)
        self.held += leases

    def record(self) -> None:
        some = self.some()
        self.store.record([result(lease, self.chance.choice(VERDICTS)) for lease in some], self.name)
        self.drop(some if self.chance.random() < 0.8 else [])  # sometimes the same results are recorded twice

    def renew(self) -> None:
        lost, _ = self.store.renew({lease.job_id: lease.attempt for lease in self.some()}, self.name, LONG)
        self.held = [lease for lease in self.held if lease.job_id not in lost or self.chance.random() < 0.5]

    def release(self) -> None:
        for lease in self.some()[:1]:
            if lease.attempt < ATTEMPTS:
                self.store.release(lease, self.name, "the container is gone")
                self.drop([lease])

    def put_back(self) -> None:
        some = self.some()
        self.store.put_back(some, self.name)
        self.returned.update((lease.job_id, lease.attempt) for lease in some)
        self.drop(some)

    def expire(self) -> None:
        self.store.expire(ATTEMPTS)

    def submit(self) -> None:
        batch_id = f"{self.name}-{self.submitted:03}"
        self.submitted += 1
        specs = some_specs(self.chance.choices(MANY, k=self.chance.randint(1, 60)), Priority.NORMAL)
        batch = Submission(specs, True)
        if self.chance.random() < 0.5:
            self.store.add_batch(batch_id, specs, None, None, batch.digests)
            self.batches.append(batch_id)
            return
        self.store.open_batch(batch_id, len(specs), None, None, {})
        self.batches.append(batch_id)
        seen: dict[str, str] = {}
        for start in range(0, len(specs), 10):
            span = slice(start, start + 10)
            leaders = dedup.find_leaders(batch_id, start, batch.digests[span], seen)
            self.store.add_jobs(batch_id, start, specs[span], 0.0, batch.digests[span], leaders)

    def cancel(self) -> None:
        batch_id = self.chance.choice(self.batches)
        if self.chance.random() < 0.3:
            self.store.cancel(batch_id=batch_id)
        else:
            total = self.store.batch(batch_id).total
            self.store.cancel(job_id=rows.job_id(batch_id, self.chance.randrange(total)))


def test_concurrent_workers_lose_no_job_and_do_not_deadlock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 20)  # large enough that transactions lock the same rows
    codes = random.Random(7).choices(MANY, k=200)
    batch = Submission(some_specs(codes, Priority.NORMAL), True)
    batches = ["b", "c"]
    for batch_id in batches:
        store.add_batch(batch_id, batch.specs, None, None, batch.digests)
    workers = [Worker(name, store, batches, seed) for seed, name in enumerate(["v", "w", "x", "y"])]
    raised = at_once(*(lambda worker=worker: worker.work(STEPS) for worker in workers))
    assert raised == []
    assert [each for worker in workers for each in worker.raised] == []
    claimed = sum((worker.claimed for worker in workers), Counter[tuple[str, int]]())
    returned = sum((worker.returned for worker in workers), Counter[tuple[str, int]]())
    assert {lease: times for lease, times in claimed.items() if times > 1 + returned[lease]} == {}
    drain(store, ATTEMPTS)
