"""How many jobs a fleet of workers puts through one PostgreSQL, and what a fleet costs that has nothing to do.

The workers are real, except that they have no sandboxes and no Celery: each has its own connections, claims by itself,
renews its leases, commits its results in groups, rings the bell in a real Redis and reconciles. A job only sleeps.
Several workers share a process. PostgreSQL is started for this with its default settings.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import psycopg
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table

from evalpool.schemas import CaseResult, JobSpec, Metrics, Settings, Verdict
from evalpool.schemas.database import Database
from evalpool.schemas.fleet import Member
from evalpool.schemas.lease import Lease
from evalpool.schemas.store import Store
from evalpool.worker.breaker import Breaker
from evalpool.worker.evaluation import finished
from evalpool.worker.intake import Intake
from evalpool.worker.inventory import Inventory
from evalpool.worker.lease import Leases
from evalpool.worker.ledger import Ledger
from evalpool.worker.pool import Pool
from evalpool.worker.queue.announcer import Announcer
from evalpool.worker.reconciler import Reconciler
from evalpool.worker.recorder import Recorder
from tests.faults.servers import PostgresServer, RedisServer, dying_with_us, wait_for

SLOTS, JOB_SECONDS = 8, 0.04
"""A worker has this many slots, and a job takes this long: it can run 200 jobs in a second."""
PROCESSES = 8
"""The most processes that the workers share."""
QUEUE = 40_000
"""How many jobs are kept waiting."""
IMAGE, DIGEST = "a:1", "sha256:" + "1" * 64
SPEC = JobSpec(code="def answer(n):\n    return n * n\n" * 10, check="assert answer(2) == 4\n" * 3)
LEFT = f"SELECT count(*) FROM (SELECT 1 FROM jobs WHERE state = 'queued' LIMIT {QUEUE // 2}) AS left_over"
TICKS = os.sysconf("SC_CLK_TCK")

console = Console(stderr=True)


class Checked(Database):
    """A database whose schema needs no check, because another process has made it."""

    def _migrate(self, upgrade: bool) -> str | None:
        return None


class Sandboxes:
    """In place of the pool: every job has a sandbox at once."""

    def begun(self, _task: Any) -> bool:
        """Whether a job has its sandbox."""
        return True


class Worker:
    """A worker without Celery and Docker."""

    def __init__(self, url: str, name: str) -> None:
        self.settings = Settings(slots=SLOTS, worker_name=name)
        self.ledger = Ledger(Store(Checked(url)))
        self.announcer = Announcer(self.settings)
        self.slots = asyncio.Semaphore(SLOTS)
        inventory = Inventory(cast(Any, None))
        inventory.names, inventory.digests = {IMAGE: DIGEST}, frozenset([DIGEST])
        self.member = Member.of(self.settings, inventory.names, inventory.digests)
        self.leases = Leases(self.ledger, name, self.settings.lease_seconds)
        self.recorder = Recorder(self.ledger, self.announcer, self.leases.__len__, name)
        needs = (Breaker("the database", lambda: self.ledger.call(Store.ping)),)
        self.intake = Intake(
            self.settings, self.ledger, self.leases, self.announcer, inventory, cast(Pool, Sandboxes()), needs=needs,
            run=self.one,
        )  # fmt: skip
        self.reconciler = Reconciler(
            self.ledger, self.announcer, self.settings, report=self.report, work=self.intake.look
        )

    async def report(self) -> Member:
        """What the worker reports about itself."""
        return self.member

    async def one(self, lease: Lease) -> None:
        """Run a job, which only sleeps."""
        try:
            async with self.slots:
                await asyncio.sleep(JOB_SECONDS)
            metrics = Metrics(wall_seconds=JOB_SECONDS, cpu_seconds=JOB_SECONDS)
            case = CaseResult(index=0, verdict=Verdict.PASSED, exit_code=0, stdout="4\n" * 50, metrics=metrics)
            more = {"cases": (case,), "metrics": metrics, "image_digest": DIGEST, "exit_code": 0}
            self.intake.over(JOB_SECONDS)
            await self.recorder.record(finished(lease, Verdict.PASSED, "", self.settings.worker_name, **more))
        finally:
            self.leases.drop(lease)
            self.intake.over()

    async def keep(self) -> None:
        """Work for ever."""
        await asyncio.gather(self.recorder.keep(), self.leases.keep(), self.reconciler.keep(), self.intake.keep())


async def work(url: str, names: list[str]) -> None:
    """Be these workers, until the process is killed."""
    await asyncio.gather(*(Worker(url, name).keep() for name in names))


# -- the measurement ---------------------------------------------------------------------------------


class Point(NamedTuple):
    """What was measured with so many workers."""

    workers: int
    jobs: float
    """Jobs per second."""
    postgres: float
    """Seconds of CPU time per second; the same for the next two."""
    fleet: float
    redis: float
    commits: float
    """Transactions of PostgreSQL per second."""

    def cell(self, share: float) -> str:
        """A share of a core, per job if there were jobs."""
        return f"{1e6 * share / self.jobs:,.0f} µs" if self.jobs else f"{share:.3f} core"


class Fleet:
    """One database with its Redis, and the fleets that are measured on it."""

    def __init__(self, stack: ExitStack) -> None:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evalpool-fleet-")))
        self.redis = RedisServer(place / "redis").start()
        stack.callback(self.redis.kill)
        self.server = PostgresServer()
        stack.callback(self.server.close)
        self.server.start(fsync="on", full_page_writes="on", shared_buffers="128MB", max_connections="400")
        self.plain = self.server.url("postgres")
        self.url = self.plain.replace("postgresql://", "postgresql+psycopg://", 1)
        self.batch = 0
        Database(self.url).close()

    def measure(self, workers: int, warm: float, seconds: float, *, idle: bool = False) -> Point:
        """Let so many workers work for some seconds, after some seconds that do not count."""
        with psycopg.connect(self.plain, autocommit=True) as db, ExitStack() as stack:
            if not idle:
                self.fill(db, QUEUE)
            shares = [list(range(workers))[n::PROCESSES] for n in range(min(PROCESSES, workers))]
            processes = [stack.enter_context(self._started([f"w{n}" for n in share])) for share in shares]
            for each in processes:
                stack.callback(each.kill)
            ready = "SELECT count(*) FROM workers WHERE seen_at > extract(epoch FROM clock_timestamp()) - 15"
            wait_for("the workers", lambda: _value(db, ready) >= workers, 120)
            self._run(db, warm, idle)
            pids = [each.pid for each in processes]
            began, before = time.monotonic(), self._read(db, pids)
            self._run(db, seconds, idle)
            took, after = time.monotonic() - began, self._read(db, pids)
            left = [each for each in processes if each.poll() is not None]
            assert not left, "a process of the fleet has ended"
            jobs, postgres, fleet, redis, commits = ((b - a) / took for a, b in zip(before, after, strict=True))
            for each in processes:
                each.kill()
            db.execute("UPDATE jobs SET state = 'finished', lease_until = NULL WHERE state IN ('queued', 'running')")
            db.execute("DELETE FROM workers")
        return Point(workers, jobs, postgres, fleet, redis, commits)

    def fill(self, db: "psycopg.Connection[Any]", count: int) -> None:
        """Add a batch of waiting jobs."""
        self.batch += 1
        name = f"b{self.batch}"
        db.execute("INSERT INTO batches (id, total, created_at) VALUES (%s, %s, 1)", [name, count])
        db.execute(
            "INSERT INTO jobs (id, batch_id, seq, spec, priority, rank, state, attempt, image, created_at) "
            "SELECT %(batch)s || '-' || lpad(i::text, 6, '0'), %(batch)s, i, %(spec)s, 'normal', "
            "(SELECT max(value) FROM turns) + i, 'queued', 0, %(image)s, extract(epoch FROM clock_timestamp()) "
            "FROM generate_series(0, %(count)s - 1) AS i",
            {"batch": name, "spec": SPEC.model_dump_json(exclude_defaults=True), "image": f"{IMAGE} {DIGEST}",
             "count": count},
        )  # fmt: skip

    def _started(self, names: list[str]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "bench.fleet", "--database", self.url, "--names", *names]
        own = os.environ | {"EVALPOOL_REDIS_URL": self.redis.url}
        return subprocess.Popen(command, env=own, preexec_fn=dying_with_us())

    def _run(self, db: "psycopg.Connection[Any]", seconds: float, idle: bool) -> None:
        """Wait, and keep the queue filled. The commands that fill it are not counted."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.5)
            if not idle and _value(db, LEFT) < QUEUE / 2:
                self.fill(db, QUEUE)

    def _read(self, db: "psycopg.Connection[Any]", pids: list[int]) -> tuple[float, ...]:
        assert self.server.process is not None
        assert self.redis.process is not None
        own = db.info.backend_pid
        postgres = _cpu(self.server.process.pid, family=True) - _cpu(own)
        fleet = sum(_cpu(pid) for pid in pids)
        done = _value(db, "SELECT coalesce(sum(count), 0) FROM tallies")
        commits = _value(db, "SELECT xact_commit FROM pg_stat_database WHERE datname = 'postgres'")
        return done, postgres, fleet, _cpu(self.redis.process.pid), commits


def _value(db: "psycopg.Connection[Any]", query: str) -> float:
    row = db.execute(query.encode()).fetchone()
    assert row is not None
    return float(row[0])


def _cpu(pid: int, *, family: bool = False) -> float:
    """The CPU seconds of a process; with its family, also those of its children, dead or alive."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    total = sum(map(int, fields[11:15] if family else fields[11:13])) / TICKS
    if family:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):
                total += _cpu(int(child))
    return total


def show(points: list[Point], idle: Point) -> None:
    """Print the curve."""
    table = Table("workers", box=ROUNDED, border_style="bright_black")
    for name in ("jobs/s", "PostgreSQL", "workers", "Redis", "commits/s", "PostgreSQL, cores", "workers, cores"):
        table.add_column(name, justify="right")
    for each in (*points, idle):
        table.add_row(
            f"{each.workers}" if each.jobs else f"{each.workers}, idle", f"{each.jobs:,.0f}", each.cell(each.postgres),
            each.cell(each.fleet), each.cell(each.redis), f"{each.commits:,.0f}", f"{each.postgres:.2f}",
            f"{each.fleet:.2f}",
        )  # fmt: skip
    Console(width=140).print(table)
    whole = idle.postgres + idle.fleet + idle.redis
    print(f"CPU time per job. {idle.workers} idle workers, their PostgreSQL and their Redis use {whole:.3f} of a core.")


def main() -> None:
    """Measure, and print the table."""
    options = argparse.ArgumentParser(prog="make fleet")
    options.add_argument("--quick", action="store_true", help="fewer points, for a shorter time")
    options.add_argument("--workers", type=int, nargs="*", help="measure these numbers of workers")
    options.add_argument("--seconds", type=float, help="how long each number is measured")
    options.add_argument("--database", help=argparse.SUPPRESS)
    options.add_argument("--names", nargs="*", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.names:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        asyncio.run(work(chosen.database, chosen.names))
        return
    numbers = chosen.workers or ([10, 50] if chosen.quick else [1, 5, 10, 25, 50, 100])
    seconds = chosen.seconds or (5 if chosen.quick else 10)
    with ExitStack() as stack:
        fleet = Fleet(stack)
        points = []
        for number in numbers:
            console.print(f"{number} workers")
            points.append(fleet.measure(number, 3, seconds))
        console.print("100 idle workers")
        idle = fleet.measure(100, 5, 2 * seconds, idle=True)
    show(points, idle)


if __name__ == "__main__":
    main()
