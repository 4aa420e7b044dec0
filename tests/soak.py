"""A soak: jobs with known verdicts without end, a random fault every few seconds, then the audit of every single row.

    python tests/soak.py --minutes 10            # a random seed, which is printed
    python tests/soak.py --minutes 10 --seed 7   # the same faults in the same order
    python tests/soak.py --flush 2000            # one batch; in its middle Redis is emptied and every worker killed

Progress goes to stderr; stdout gets one line of totals. Exit code 0: no job lost, doubled or misjudged, nothing left.
"""

import argparse
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
from sqlalchemy.exc import SQLAlchemyError  # noqa: E402

from schemas import QueueUnavailable  # noqa: E402
from schemas.database import Database  # noqa: E402
from schemas.store import Store  # noqa: E402
from tests.conftest import containers  # noqa: E402
from tests.faults.audit import Audit, audit  # noqa: E402
from tests.faults.fleet import Fleet  # noqa: E402
from tests.faults.jobs import mixed  # noqa: E402
from tests.faults.proxy import Proxy  # noqa: E402
from tests.faults.servers import PostgresServer, RedisServer  # noqa: E402

ATTEMPTS = 6
"""More than the default: here one job may well lose its worker three times, and would be given up with good reason."""
BACKLOG = 200
"""Jobs that wait at least, while faults go on."""
DRAIN_SECONDS = 300.0


class Soak:
    """The fleet, and what is done to it."""

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
            "EVALPOOL_MAX_ATTEMPTS": str(ATTEMPTS),
            "EVALPOOL_MAX_USES": "50",
        }
        stack.callback(self._sweep)
        stack.callback(self.fleet.close)
        self._peace, self._over = threading.Event(), threading.Event()
        self._started = time.monotonic()

    # -- the course of it --------------------------------------------------------------------------

    def run(self) -> Audit:
        """Jobs and faults for the chosen time, then peace, then the audit."""
        for _ in range(self.options.workers):
            self.fleet.start(ready=False)
        submitter = threading.Thread(target=self._keep_submitting, name="submitter", daemon=True)
        reporter = threading.Thread(target=self._keep_reporting, name="reporter", daemon=True)
        submitter.start()
        reporter.start()
        end = time.monotonic() + self.options.minutes * 60
        while time.monotonic() < end:
            time.sleep(self.random.uniform(0.4, 1.6) * self.options.every)
            self._one_fault()
            self._supervise()
        self._peace.set()
        submitter.join()
        return self._end()

    def flush(self, count: int) -> Audit:
        """One batch; in its middle Redis is emptied and every worker killed; then they are started anew."""
        for _ in range(self.options.workers):
            self.fleet.start(ready=False)
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
        self._supervise()
        found: Audit | None = None
        try:
            self.fleet.wait_done(seconds=DRAIN_SECONDS)
            self.fleet.wait_until("an empty queue", lambda: not self.broker.waiting() and not self.broker.unacked())
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

    def _audit(self) -> Audit:
        return audit(self.fleet.store, self.fleet.expected, attempts=ATTEMPTS)

    def _supervise(self) -> None:
        """As a process manager would: so many workers, whatever happens to them."""
        for _ in range(self.options.workers - len(self.fleet.alive)):
            self.fleet.start(ready=False)

    def _keep_submitting(self) -> None:
        chance = random.Random(self.options.seed)
        open_jobs = 0
        while not self._peace.wait(0.1):
            with suppress(SQLAlchemyError):
                open_jobs = self.fleet.total() - self.fleet.done()
            if open_jobs >= BACKLOG:
                continue
            size, priority = chance.randint(1, 80), chance.choice(("high", "normal", "normal", "low"))
            try:
                self.fleet.submit(mixed(size, priority=priority))
            except QueueUnavailable:
                pass  # stored, and to be found by a reconciler
            except SQLAlchemyError as error:
                self._say(f"not submitted: {type(error).__name__}")  # nothing is stored, so nothing is expected

    # -- the faults --------------------------------------------------------------------------------

    def _one_fault(self) -> None:
        kinds: list[Callable[[], object]] = [
            self.kill_worker, self.stop_worker, self.freeze_worker, self.kill_redis, self.flush_redis,
            self.repeat_messages, self.remove_sandbox, self.freeze_engine, self.cut_engine,
        ]  # fmt: skip
        kinds += [self.lock_database] if self.postgres is None else [self.restart_database, self.end_sessions]
        fault = self.random.choice(kinds)
        self.faults[fault.__name__] += 1
        with suppress(redis.RedisError, DockerException, ProcessLookupError):
            fault()

    def kill_worker(self) -> None:
        self._victim().stop(signal.SIGKILL)

    def stop_worker(self) -> None:
        victim = self._victim()
        self.fleet.start(ready=False)
        victim.process.send_signal(signal.SIGTERM)

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
        """What workers that were killed just now could not take along."""
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
        f"{len(found.double)} double, {len(found.wrong)} wrong verdicts, {len(found.other)} other problems; "
        f"{sum(soak.faults.values())} faults ({faults}); {time.monotonic() - began:.0f} s, seed {options.seed}\n"
    )
    if not found.problems:
        shutil.rmtree(place, ignore_errors=True)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
