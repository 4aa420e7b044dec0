"""A soak: jobs with known verdicts without end, a random fault every few seconds, then the audit of every single row.

There are batches of identical jobs that share results, large ones, single jobs from several threads, an image whose tag
is moved, jobs that no worker can read for a while, and cancels of all of them. On SQLite, one worker's clock is an hour
ahead. A job that has lost its worker or its sandbox at every attempt is given up with good reason, and counted.

    python tests/soak.py --minutes 10            # a random seed, which is printed
    python tests/soak.py --minutes 10 --seed 7   # the same faults in the same order
    python tests/soak.py --flush 2000            # one batch; in its middle Redis is emptied and every worker killed

Progress goes to stderr; stdout gets one line of totals. Exit code 0: no job lost, doubled or misjudged, nothing left.
"""

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT)  # instead of tests/, whose folders have the names of our packages

import docker  # noqa: E402
import redis  # noqa: E402
from docker.errors import DockerException  # noqa: E402
from sqlalchemy import text  # noqa: E402
from sqlalchemy.exc import SQLAlchemyError  # noqa: E402

from evalpool.api.handles import BatchHandle, Job  # noqa: E402
from evalpool.schemas import QueueUnavailable, Result, Settings, Verdict  # noqa: E402
from evalpool.schemas import audit as ledger  # noqa: E402
from evalpool.schemas.database import Database  # noqa: E402
from evalpool.schemas.errors import DatabaseUnavailable  # noqa: E402
from evalpool.schemas.store import WHOLE, Store  # noqa: E402
from tests.conftest import containers, freeze  # noqa: E402
from tests.faults.audit import Audit, audit  # noqa: E402
from tests.faults.fleet import Fleet, an_hour_ahead  # noqa: E402
from tests.faults.images import moving_tag  # noqa: E402
from tests.faults.jobs import Known, alike, mixed, quick  # noqa: E402
from tests.faults.proxy import Proxy  # noqa: E402
from tests.faults.servers import PostgresServer, RedisServer  # noqa: E402

ATTEMPTS = Settings.model_fields["max_attempts"].default
GIVEN_UP = ("given up: ", f"worker lost: its lease expired in the last of {ATTEMPTS} attempts")
"""How the detail of a job begins that was given up."""
BACKLOG = 200
"""How many jobs wait at least while there are faults."""
SINGLE = 3
"""How many threads submit single jobs."""
FUTURE = '"field_of_the_future":"x",'
"""A value of a job's row that no worker of this version can read."""
FUTURE_SECONDS = 10.0
DRAIN_SECONDS = 300.0


class Soak:
    """A fleet, its jobs and its faults."""

    def __init__(self, place: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        self.options, self.random = options, random.Random(options.seed)
        self.faults: Counter[str] = Counter()
        self.broker = RedisServer(place / "redis").start()
        stack.callback(self.broker.kill)
        self.postgres: PostgresServer | None = None
        self._ledger = place / "ledger.db"
        url = f"sqlite:///{self._ledger}"
        if options.database == "postgresql":
            self.postgres = PostgresServer()
            stack.callback(self.postgres.close)
            self.postgres.start().execute("CREATE DATABASE soak")
            url = self.postgres.url("soak").replace("postgresql://", "postgresql+psycopg://", 1)
        engine = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
        self.link = stack.enter_context(Proxy(Path(engine), place / "d.sock"))
        os.environ.update(EVALPOOL_REDIS_URL=self.broker.url, EVALPOOL_DATABASE_URL=url, EVALPOOL_STATE_DIR=str(place))
        database = Database(url)
        stack.callback(database.close)
        client = docker.from_env(timeout=60)
        stack.callback(client.close)
        self.fleet = Fleet(Store(database), self.broker, client, place)
        self.fleet.env |= {
            "DOCKER_HOST": self.link.url,
            "EVALPOOL_DOCKER_TIMEOUT": "5",
            "EVALPOOL_MAX_USES": "50",
        }
        self.tag = stack.enter_context(moving_tag(client, Settings.model_fields["image"].default))
        self.tagged: set[str] = set()
        """Batches whose jobs name this tag."""
        self.unsure: dict[str, Known] = {}
        """Task id → a single job of which we do not know whether it is stored, since the database failed."""
        self.unreadable: dict[str, float] = {}
        """Jobs that no worker can read, and since when."""
        self.paused: set[str] = set()
        """Sandboxes that were paused."""
        self.given_up: list[str] = []
        self._ahead = an_hour_ahead() if self.postgres is None else None
        self._ahead_pid = 0
        stack.callback(self._sweep)
        stack.callback(self.fleet.close)
        self._peace, self._over = threading.Event(), threading.Event()
        self._started = time.monotonic()

    # -- the course of it --------------------------------------------------------------------------

    def run(self) -> Audit:
        """Submit jobs and cause faults for the chosen time; then wait for all jobs, and audit them."""
        self._supervise()
        submitters = [threading.Thread(target=self._keep_submitting, name="submitter", daemon=True)]
        submitters += [
            threading.Thread(target=self._keep_submitting_single, args=(n,), daemon=True) for n in range(SINGLE)
        ]
        reporter = threading.Thread(target=self._keep_reporting, name="reporter", daemon=True)
        for thread in (*submitters, reporter):
            thread.start()
        end = time.monotonic() + self.options.minutes * 60
        while time.monotonic() < end:
            time.sleep(self.random.uniform(0.4, 1.6) * self.options.every)
            self._one_fault()
            self._make_readable(FUTURE_SECONDS)
            self._supervise()
        self._peace.set()
        for thread in submitters:
            thread.join()
        return self._end()

    def flush(self, count: int) -> Audit:
        """Submit one batch. When half of it is done, empty Redis, kill every worker and restart them."""
        self._supervise()
        threading.Thread(target=self._keep_reporting, name="reporter", daemon=True).start()
        self.fleet.submit(mixed(count, seconds=0.02))
        self.fleet.wait_done(count // 2, DRAIN_SECONDS)
        self.broker.client.flushall()
        self.fleet.kill()
        self.faults.update(flush=1, kill_worker=self.options.workers)
        return self._end()

    def _end(self) -> Audit:
        self._say("faults are over; draining")
        self.link.mend()
        self.link.thaw()
        self._make_readable(0)
        self._adopt()
        found: Audit | None = None
        try:
            self.fleet.wait_until("all is done", self._drained, DRAIN_SECONDS)
        except AssertionError as error:
            found = self._audit()
            found.other.append(str(error))
        found = found or self._audit()
        codes = self.fleet.stop()
        if any(codes):
            found.other.append(f"exit codes {codes}")
        end = time.monotonic() + 10
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.2)
        if left:
            found.other.append(f"{len(left)} containers are left")
        return found

    def _drained(self) -> bool:
        """Whether all jobs have their results, and all messages are read. Until then, workers that end are replaced."""
        self._supervise()
        if self._ahead is not None:
            self.fleet.forget_messages_of_the_future()
        return self.fleet.done() >= self.fleet.total() and not self.broker.waiting() and not self.broker.unacked()

    def _audit(self) -> Audit:
        """Check that every verdict is the known one, except for jobs that were cancelled or given up with good
        reason."""
        paused: set[str] = set()
        for batch_id in self.fleet.expected:
            for result in self.fleet.store.batch_results(batch_id):
                if result.sandbox_id in self.paused:
                    paused.add(result.job_id)
                if result.verdict is Verdict.SANDBOX_ERROR and self._with_reason(result):
                    self.given_up.append(result.job_id)
        self.fleet.allow(Verdict.SANDBOX_ERROR, of=self.given_up)
        found = audit(self.fleet.store, self.fleet.expected, attempts=ATTEMPTS, instead=self.fleet.instead)
        for batch_id in self.tagged:
            ran = self.fleet.store.batch_results(batch_id)
            images = {result.image_digest for result in ran if result.image_digest}
            if len(images) > 1 or not images <= set(self.tag.images):
                found.other.append(f"batch {batch_id} was run in {sorted(images)}")
        found.wrong = [
            f"{each} (its sandbox was once paused)" if each.partition(":")[0] in paused else each
            for each in found.wrong
        ]
        found.other += [f"{each.what}: {list(each.ids)[:5]}" for each in ledger.audit(self.fleet.store, repair=False)]
        return found

    @staticmethod
    def _with_reason(result: Result) -> bool:
        """Whether a job that was given up has used all its attempts, and its detail says so."""
        return result.attempt == ATTEMPTS and result.detail.startswith(GIVEN_UP)

    def _supervise(self) -> None:
        """Replace the workers that have ended, as a process manager would."""
        for _ in range(self.options.workers - len(self.fleet.alive)):
            self._start()

    def _start(self) -> None:
        """Start one more worker. If faketime is installed, the clock of one worker is an hour ahead."""
        if self._ahead is not None and self._ahead_pid not in {worker.pid for worker in self.fleet.alive}:
            self._ahead_pid = self.fleet.start(ready=False, **self._ahead).pid
        else:
            self.fleet.start(ready=False)

    # -- the jobs ----------------------------------------------------------------------------------

    def _keep_submitting(self) -> None:
        chance = random.Random(self.options.seed)
        large = iter(("shared", "cancelled"))
        next_large = 0.2  # of the whole time
        while not self._peace.wait(0.1):
            if self._open_jobs() >= BACKLOG:
                continue
            size, priority = chance.randint(1, 80), chance.choice(("high", "normal", "normal", "low"))
            kind = chance.choice(("plain", "plain", "shared", "tagged"))
            if time.monotonic() - self._started > next_large * self.options.minutes * 60:
                next_large += 0.4
                self._submit_large(next(large, None))
            if kind == "shared":
                self._submit(alike(mixed(max(1, size // 8), priority=priority), 20), dedup=True)
            elif kind == "tagged":
                batch_id = self._submit(mixed(size // 2 + 1, priority=priority, image=self.tag.name))
                self.tagged.add(batch_id)
            else:
                self._submit(mixed(size, priority=priority))

    def _submit_large(self, kind: str | None) -> None:
        """Submit more jobs than one transaction stores. Either they share few results, or the batch is cancelled."""
        if kind == "shared":
            self._submit(alike(quick(WHOLE // 40), 41), dedup=True)
        elif kind == "cancelled":
            batch_id = self._submit(quick(WHOLE + 100))
            self._peace.wait(5)
            self._cancel(batch_id)

    def _submit(self, jobs: list[Known], **more: Any) -> str:
        """Submit a batch. If the database fails, submit it again with the same key, as it may be stored already."""
        key = secrets.token_hex(8)
        while True:
            try:
                return self.fleet.submit(jobs, idempotency_key=key, **more).id
            except QueueUnavailable as error:
                return error.batch_id  # stored, and to be found by a worker
            except DatabaseUnavailable as error:
                self._say(f"not submitted yet: {type(error).__name__}")
                time.sleep(0.5)

    def _cancel(self, batch_id: str) -> None:
        """Cancel a batch. From now on, `cancelled` is accepted for its jobs."""
        while True:
            try:
                return self.fleet.cancel(BatchHandle(batch_id))
            except DatabaseUnavailable:
                time.sleep(0.5)

    def _keep_submitting_single(self, number: int) -> None:
        chance, kinds, count = random.Random(self.options.seed + number), mixed(60), 0
        while not self._peace.wait(0.05):
            if self._open_jobs() >= 2 * BACKLOG:
                continue
            known, count = chance.choice(kinds), count + 1
            spec = known.spec.model_copy(update={"task_id": f"single-{number}-{count}"})
            known = Known(spec, known.verdict, known.stdout)
            try:
                with suppress(TimeoutError):
                    self.fleet.submit_one(known).result(timeout=2)
            except QueueUnavailable:
                pass
            except (DatabaseUnavailable, redis.RedisError):
                self.unsure[str(spec.task_id)] = known

    def _adopt(self) -> None:
        """Expect results of single jobs that are stored although their submission failed."""
        query = text("SELECT j.batch_id, j.task_id FROM jobs j JOIN batches b ON b.id = j.batch_id WHERE b.total = 1")
        with self.fleet.store.database.read() as db:
            stored = {row.batch_id: json.loads(row.task_id) for row in db.execute(query)}
        for batch_id, task_id in stored.items():
            if batch_id not in self.fleet.expected and task_id in self.unsure:
                self.fleet.expected[batch_id] = [self.unsure[task_id]]

    def _open_jobs(self) -> int:
        try:
            return self.fleet.total() - self.fleet.done()
        except SQLAlchemyError:
            return 0

    # -- the faults --------------------------------------------------------------------------------

    def _one_fault(self) -> None:
        kinds: list[Callable[[], object]] = [
            self.kill_worker, self.stop_worker, self.freeze_worker, self.kill_redis, self.flush_redis,
            self.repeat_messages, self.remove_sandbox, self.pause_sandbox, self.freeze_engine, self.cut_engine,
            self.cancel_batch, self.cancel_jobs, self.move_tag, self.hide_jobs,
        ]  # fmt: skip
        kinds += [self.lock_database] if self.postgres is None else [self.restart_database, self.end_sessions]
        fault = self.random.choice(kinds)
        self.faults[fault.__name__] += 1
        with suppress(redis.RedisError, DockerException, ProcessLookupError, SQLAlchemyError):
            fault()

    def kill_worker(self) -> None:
        self._victim().stop(signal.SIGKILL)

    def stop_worker(self) -> None:
        victim = self._victim()
        victim.process.send_signal(signal.SIGTERM)
        self.fleet.start(ready=False)

    def freeze_worker(self) -> None:
        victim = self._victim()
        victim.process.send_signal(signal.SIGSTOP)
        self._for_a_while(6)
        victim.process.send_signal(signal.SIGCONT)

    def kill_redis(self) -> None:
        self.broker.kill()
        self._for_a_while(4)
        self.broker.start()

    def flush_redis(self) -> None:
        self.broker.client.flushall()

    def repeat_messages(self) -> None:
        for queue in ("evalpool.high", "evalpool.normal", "evalpool.low"):
            messages: Any = self.broker.client.lrange(queue, 0, 20)
            if messages:
                self.broker.client.rpush(queue, *messages * 3)

    def remove_sandbox(self) -> None:
        boxes = containers(self.fleet.engine, self._victim().pid)
        if boxes:
            self.fleet.engine.api.remove_container(self.random.choice(boxes), force=True)

    def pause_sandbox(self) -> None:
        boxes = containers(self.fleet.engine, self._victim().pid)
        if boxes:
            box = self.random.choice(boxes)
            self.paused.add(box)
            freeze(self.fleet.engine, box)
            self._for_a_while(8)
            self.fleet.engine.api.unpause(box)

    def cancel_batch(self) -> None:
        self._cancel(self.random.choice(list(self.fleet.expected)[-20:]))

    def cancel_jobs(self) -> None:
        """Cancel a few jobs of a batch, including the first, which is a leader if results are shared."""
        batch = BatchHandle(self.random.choice(list(self.fleet.expected)[-20:]))
        ids = self.fleet.ids(batch)
        for each in {ids[0], *self.random.sample(ids, min(len(ids), 4))}:
            self.fleet.allow(Verdict.CANCELLED, of=[each])
            Job(each).cancel()

    def move_tag(self) -> None:
        self.tag.move(self.random.randrange(2))

    def hide_jobs(self) -> None:
        """Change some waiting jobs into jobs that only a newer version can read."""
        query = text("SELECT id FROM jobs WHERE state = 'queued' AND attempt = 0 ORDER BY rank DESC LIMIT 10")
        with self.fleet.store.database.read() as db:
            ids = [str(row.id) for row in db.execute(query) if row.id.rpartition("-")[0] in self.fleet.expected]
        hide = "UPDATE jobs SET spec = :future || substr(spec, 2) WHERE id = :id AND state = 'queued'"
        for each in ids:  # one by one, so that nobody waits for us in the wrong order
            self.unreadable[each] = time.monotonic()
            self.fleet.sql(hide, future="{" + FUTURE, id=each)

    def _make_readable(self, seconds: float) -> None:
        """Make jobs readable again that could not be read for this long."""
        show = "UPDATE jobs SET spec = replace(spec, :future, '') WHERE id = :id"
        free = "UPDATE jobs SET lease_until = NULL WHERE id = :id AND state = 'queued' AND worker LIKE 'version %'"
        with suppress(SQLAlchemyError):
            for each, since in list(self.unreadable.items()):
                if time.monotonic() - since >= seconds:
                    self.fleet.sql(show, future=FUTURE, id=each)
                    self.fleet.sql(free, id=each)
                    del self.unreadable[each]

    def freeze_engine(self) -> None:
        self.link.freeze()
        self._for_a_while(8)
        self.link.thaw()

    def cut_engine(self) -> None:
        self.link.cut()
        self._for_a_while(4)
        self.link.mend()

    def lock_database(self) -> None:
        other = sqlite3.connect(self._ledger, isolation_level=None, timeout=60)
        other.execute("BEGIN IMMEDIATE")
        self._for_a_while(6)
        other.execute("ROLLBACK")
        other.close()

    def restart_database(self) -> None:
        assert self.postgres is not None
        self.postgres.stop(signal.SIGQUIT)
        self._for_a_while(6)
        self.postgres.start()

    def end_sessions(self) -> None:
        assert self.postgres is not None
        self.postgres.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'soak'")

    def _victim(self) -> Any:
        self._supervise()
        return self.random.choice(self.fleet.alive)

    def _for_a_while(self, most: float) -> None:
        time.sleep(self.random.uniform(0.2, most))

    # -- words, and the end ------------------------------------------------------------------------

    def _keep_reporting(self) -> None:
        while not self._over.wait(10):
            with suppress(SQLAlchemyError, AssertionError):
                faults = sum(self.faults.values())
                self._say(f"{self.fleet.done()} of {self.fleet.total()} jobs done, {faults} faults")

    def _say(self, words: str) -> None:
        sys.stderr.write(f"{time.monotonic() - self._started:6.0f} s  {words}\n")

    def _left(self) -> list[str]:
        return [each for worker in self.fleet.workers for each in containers(self.fleet.engine, worker.pid)]

    def _sweep(self) -> None:
        """Remove what workers that were just killed have left behind."""
        self._peace.set()
        self._over.set()
        self.link.mend()
        self.link.thaw()
        with suppress(DockerException):
            for box in self._left():
                with suppress(DockerException):
                    self.fleet.engine.api.remove_container(box, force=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long faults go on (default: 10)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="of the faults (default: random)")
    parser.add_argument("--every", type=float, default=5, help="seconds between faults, on average (default: 5)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes at a time (default: 2)")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--flush", type=int, metavar="JOBS", help="instead: the one batch of so many jobs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in [name for name in os.environ if name.startswith("EVALPOOL_")]:
        del os.environ[name]
    place = Path(tempfile.mkdtemp(prefix="soak-"))
    sys.stderr.write(f"seed {options.seed}, logs in {place}\n")
    began = time.monotonic()
    try:
        with ExitStack() as stack:
            soak = Soak(place, options, stack)
            found = soak.flush(options.flush) if options.flush else soak.run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; everything is cleaned up\n")
        shutil.rmtree(place, ignore_errors=True)
        return 130
    for problem in found.problems[:50]:
        sys.stderr.write(f"{problem}\n")
    faults = ", ".join(f"{name} {count}" for name, count in sorted(soak.faults.items()))
    sys.stdout.write(
        f"{'FAILED' if found.problems else 'ok'}: {found.jobs} jobs, {found.results} results, {len(found.lost)} lost, "
        f"{len(found.double)} double, {len(found.wrong)} wrong verdicts, {len(found.other)} other problems, "
        f"{len(soak.given_up)} given up; "
        f"{sum(soak.faults.values())} faults ({faults}); {time.monotonic() - began:.0f} s, seed {options.seed}\n"
    )
    if not found.problems:
        shutil.rmtree(place, ignore_errors=True)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
