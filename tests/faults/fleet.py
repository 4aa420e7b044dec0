"""Workers that share one ledger and one queue, the jobs that were submitted to them, and the audit of the results."""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker
from sqlalchemy import text

from evalpool.api import submit_batch, submit_job
from evalpool.api.handles import BatchHandle, Job
from evalpool.schemas import QueueUnavailable, Verdict
from evalpool.schemas import audit as ledger
from evalpool.schemas.rows import job_id
from evalpool.schemas.store import Store
from tests.conftest import PATIENCE, WorkerProcess, containers, eventually
from tests.faults.audit import audit
from tests.faults.jobs import Known
from tests.faults.servers import RedisServer

QUICK = {
    "EVALPOOL_SLOTS": "2",
    "EVALPOOL_LEASE_SECONDS": "3",
    "EVALPOOL_RECONCILE_SECONDS": "0.3",
    "EVALPOOL_VISIBILITY_SECONDS": "3",
    "EVALPOOL_REDIS_TIMEOUT": "5",
}
"""Settings with which workers notice faults within seconds."""
TAIL = 4000


class Fleet:
    """Starts workers, submits jobs with known verdicts, and audits the results."""

    def __init__(self, store: Store, broker: RedisServer, engine: docker.DockerClient, place: Path) -> None:
        self.store, self.broker, self.engine, self.place = store, broker, engine, place
        self.env = dict(QUICK)
        self.workers: list[WorkerProcess] = []
        self.expected: dict[str, Sequence[Known]] = {}
        self.instead: dict[str, Collection[Verdict]] = {}
        """Job id → the verdicts that are right for the job after this fault."""
        self.audited = False

    # -- workers -----------------------------------------------------------------------------------

    def start(self, *, ready: bool = True, through: Sequence[str] = (), **env: str) -> WorkerProcess:
        """Start one more worker; with `ready=False`, do not wait until it is ready."""
        log = self.place / f"worker-{len(self.workers)}.log"
        worker = WorkerProcess(log, through=through, **self.env | env)
        self.workers.append(worker)
        return worker.wait_ready() if ready else worker

    @property
    def alive(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.process.poll() is None]

    def kill(self) -> None:
        """Kill every worker at once."""
        dying = self.alive
        for worker in dying:
            worker.process.send_signal(signal.SIGKILL)
        for worker in dying:
            worker.process.wait()

    def boxes(self, worker: WorkerProcess) -> list[str]:
        """Return the containers of a worker."""
        return containers(self.engine, worker.pid)

    def clean(self, worker: WorkerProcess) -> bool:
        """Whether a worker has left no container behind."""
        return not self.boxes(worker)

    # -- jobs --------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Known], **more: Any) -> BatchHandle:
        """Submit known jobs as a batch. If the queue cannot be reached, this raises, but the jobs count all the
        same."""
        try:
            batch = submit_batch([known.spec for known in jobs], **more)
        except QueueUnavailable as error:
            self.expected[error.batch_id] = jobs
            raise
        self.expected[batch.id] = jobs
        return batch

    def submit_one(self, known: Known) -> Job:
        """Submit a known job by itself."""
        try:
            job = submit_job(known.spec)
        except QueueUnavailable as error:
            self.expected[error.batch_id] = [known]
            raise
        self.expected[job.batch_id] = [known]
        return job

    def allow(self, *verdicts: Verdict, of: Iterable[str]) -> None:
        """Accept these verdicts, too, for the jobs with these ids from now on."""
        for each in of:
            batch_id, _, seq = each.rpartition("-")
            self.instead[each] = {*self.instead.get(each, (self.expected[batch_id][int(seq)].verdict,)), *verdicts}

    def cancel(self, batch: BatchHandle) -> None:
        """Cancel the rest of a batch. From now on, `cancelled` is accepted for its jobs."""
        self.allow(Verdict.CANCELLED, of=self.ids(batch))
        batch.cancel()

    def ids(self, batch: BatchHandle) -> list[str]:
        """Return the ids of the jobs of a batch, in the order of submission."""
        return [job_id(batch.id, index) for index in range(len(self.expected[batch.id]))]

    def attempts(self, batch: BatchHandle) -> dict[str, int]:
        """Return how often each job of a batch was claimed."""
        query = text("SELECT id, attempt FROM jobs WHERE batch_id = :batch_id")
        with self.store.database.read() as db:
            return {row.id: row.attempt for row in db.execute(query, {"batch_id": batch.id})}

    def sql(self, command: str, **values: object) -> None:
        """Change rows directly, without any of the store's checks."""
        with self.store.database.write() as db:
            db.execute(text(command), values)

    def done(self) -> int:
        """Return how many jobs of all batches have a result."""
        with self.store.database.read() as db:
            return int(db.execute(text("SELECT count(*) FROM results")).scalar_one())

    def total(self) -> int:
        return sum(map(len, list(self.expected.values())))

    def wait_done(self, count: int | None = None, seconds: float = PATIENCE) -> None:
        """Wait until this many jobs, or all, have their results. Fails at once if no worker is left."""
        wanted = self.total() if count is None else count
        end = time.monotonic() + seconds
        while self.done() < wanted:
            assert self.alive, f"no worker is alive; {self.tails()}"
            assert time.monotonic() < end, f"{self.done()} of {wanted} done after {seconds:g} s; {self.state()}"
            time.sleep(0.05)

    # -- the end -----------------------------------------------------------------------------------

    def finish(self, seconds: float = PATIENCE) -> None:
        """Wait for all jobs, audit them, stop the workers and check that they left nothing behind."""
        self.audited = True
        self.wait_done(seconds=seconds)
        found = audit(self.store, self.expected, instead=self.instead)
        assert not found.problems, "\n".join([*found.problems[:20], self.tails()])
        assert ledger.audit(self.store, repair=False) == []
        self.wait_until("the queue is empty", lambda: not self.broker.waiting() and not self.broker.unacked())
        codes = self.stop()
        assert not any(codes), f"exit codes {codes}; {self.tails()}"
        left = [each for worker in self.workers for each in self.boxes(worker)]
        if left:
            eventually(lambda: all(map(self.clean, self.workers)), 10)

    def stop(self) -> list[int]:
        """Stop the workers that still run, and return their exit codes."""
        ending = self.alive
        for worker in ending:
            worker.process.send_signal(signal.SIGTERM)
        return [worker.process.wait(PATIENCE) for worker in ending]

    def close(self) -> None:
        """Kill everything that is left, whatever has happened."""
        for worker in self.alive:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGCONT)
        with suppress(Exception):
            self.stop()
        self.kill()

    def wait_until(self, what: str, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Wait for a condition. If it does not come true, the error shows the state of the fleet."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds:g} s: {what}; {self.state()}"
            time.sleep(0.05)

    def forget_messages_of_the_future(self) -> None:
        """Remove the messages that a worker with a fast clock had fetched when it was killed. Celery stores the
        worker's time with them, so they would come back only in an hour. No job depends on them."""
        ahead: Any = self.broker.client.zrangebyscore("unacked_index", time.time() + 60, "+inf")
        for message in ahead:
            self.broker.client.hdel("unacked", message)
            self.broker.client.zrem("unacked_index", message)

    def state(self) -> str:
        """Return the state of the fleet, for the message of a failure."""
        progress = [str(self.store.progress(batch_id)) for batch_id in list(self.expected)[-4:]]
        queues = (
            f"queued {self.broker.waiting()}, unacked {self.broker.unacked()}" if self.broker.process else "no Redis"
        )
        return "\n".join([*progress, queues, self.tails()])

    def tails(self) -> str:
        """Return the last log lines of the workers."""
        return "\n".join(f"--- {each.log.name} (pid {each.pid})\n{_tail(each.log)}" for each in self.workers[-4:])


def an_hour_ahead() -> dict[str, str] | None:
    """Return the environment of a worker whose clock is an hour ahead, or `None` if faketime is not installed."""
    library = next(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        return None
    return {"LD_PRELOAD": str(library), "FAKETIME": "+1h", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def _tail(log: Path) -> str:
    """Return a log without the banner and without the jobs that went well."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    telling = (line for line in lines if line[:1] not in ("", " ", "-", "[") and "job_finished" not in line)
    return "\n".join(telling)[-TAIL:]
