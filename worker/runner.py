"""What one worker process owns (the event loop in its own thread, the pool, the leases, the recorder), and what it does
with a handful of job ids: lease, evaluate, record."""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from schemas.database import Database
from schemas.errors import SandboxLost, SetupError
from schemas.settings import Settings
from schemas.store import Lease, Store
from schemas.verdict import Verdict
from worker import celery
from worker.bell import Bell
from worker.evaluation import evaluate, finished
from worker.lease import CANCELLED, Leases
from worker.ledger import Ledger
from worker.pool import Pool, PoolClosed
from worker.reconciler import Reconciler
from worker.recorder import Recorder
from worker.sandbox.base import Sandbox, Shape
from worker.sandbox.docker import DockerSandbox
from worker.sandbox.engine import Engine, NoAgent
from worker.sandbox.exec import ExecSandbox

log = logging.getLogger("evalpool.runner")

SWEEP_SECONDS = 60.0

T = TypeVar("T")


class Runner:
    """Built when a worker starts, closed when it ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="evalpool-loop", daemon=True)
        self._keepers: list[asyncio.Task[None]] = []
        self._without_agent: set[str] = set()
        self._draining = False
        self._closed = False

    def start(self) -> None:
        """Open the ledger, sweep, warm the pool. `SetupError` or `SchemaMismatch` when this machine is not fit."""
        store = Store(Database(self.settings.store_url))
        self._thread.start()
        try:
            self._call(self._build(store))
        except BaseException:
            self.close()
            raise

    def run(self, job_ids: Sequence[str]) -> None:
        """Called from Celery's threads: returns when every job is committed, put back, or somebody else's."""
        self._call(self._work(job_ids))

    def drain(self) -> None:
        """Finish what runs, take nothing new. Safe in a signal handler."""
        self._draining = True
        self._loop.call_soon_threadsafe(self._pool.stop_lending)

    def snapshot(self) -> dict[str, Any]:
        """How this worker is, for `celery -A worker inspect sandbox_pool`."""

        async def look() -> dict[str, Any]:
            return {
                "worker": self.settings.worker_name,
                "slots": self.settings.slots,
                "running": len(self._leases),
                "draining": self._draining,
                "reconciler": dict(self._reconciler.counts),
                **self._pool.snapshot(),
            }

        return self._call(look())

    def close(self) -> None:
        """Destroy the sandboxes, finish the ledger, end the loop. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._call(self._tear_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- on the loop -------------------------------------------------------------------------------

    async def _build(self, store: Store) -> None:
        settings = self.settings
        self._ledger = Ledger(store)
        self._bell = Bell(settings.queue_url)
        self._engine = Engine(settings.docker_timeout)
        self._pool = Pool(self._make, settings.slots, settings.max_uses)
        self._leases = Leases(self._ledger, settings.worker_name, settings.lease_seconds)
        self._recorder = Recorder(self._ledger, self._bell)
        self._reconciler = Reconciler(self._ledger, settings)
        try:
            await self._engine.call(self._engine.sweep)
            await self._pool.warm(Shape(settings.image, 512, 64, 64))
        except SandboxLost as error:
            raise SetupError(f"no sandbox can be started here: {error}") from error
        keepers = (self._recorder.keep(), self._leases.keep(), self._reconciler.keep(), self._sweep())
        self._keepers = [asyncio.create_task(keeper) for keeper in keepers]

    async def _make(self, shape: Shape) -> Sandbox:
        """A started sandbox: with our agent, or without where the image has no Python for it."""
        if shape.image not in self._without_agent:
            sandbox = DockerSandbox(shape, self._engine, settings=self.settings)
            try:
                await sandbox.start()
                return sandbox
            except NoAgent as error:
                if shape.image not in self._without_agent:
                    log.warning("no Python in %s: the slow way (%s)", shape.image, error, extra={"action": "no_agent"})
                self._without_agent.add(shape.image)
        fallback = ExecSandbox(shape, self._engine, self.settings.runtime)
        await fallback.start()
        return fallback

    async def _work(self, job_ids: Sequence[str]) -> None:
        """The way of a chunk."""
        if self._draining:
            return
        leases = await self._leases.claim(job_ids)
        tasks = [asyncio.create_task(self._one(lease)) for lease in leases]
        for lease, task in zip(leases, tasks, strict=True):
            self._leases.hold(lease, task)
        await asyncio.gather(*tasks)

    async def _one(self, lease: Lease) -> None:
        """The way of a job, once it is ours."""
        try:
            if lease.attempt > self.settings.max_attempts:
                result = self._ended(lease, Verdict.SANDBOX_ERROR, f"given up after {lease.attempt - 1} attempts")
            else:
                result = await evaluate(lease, self._pool, self.settings)
            await self._recorder.record(result)
            log.info("%s", result.detail, extra=_ids(lease, "job_finished") | {"verdict": result.verdict.value})
        except PoolClosed:
            await self._put_back(lease, tried=False)
        except (SandboxLost, SetupError) as error:
            log.warning("attempt %d failed: %s", lease.attempt, error, extra=_ids(lease, "attempt_failed"))
            await self._put_back(lease, tried=True)
        except Exception:  # a bug of ours: it must cost an attempt, not leave the job hanging until its lease runs out
            log.exception("attempt %d failed by a bug", lease.attempt, extra=_ids(lease, "bug"))
            await self._put_back(lease, tried=True)
        except asyncio.CancelledError as stop:
            if CANCELLED in stop.args:
                await self._recorder.record(self._ended(lease, Verdict.CANCELLED, "cancelled while it ran"))
            else:
                log.warning("another worker has taken the job over", extra=_ids(lease, "lease_lost"))
        finally:
            self._leases.drop(lease)

    def _ended(self, lease: Lease, verdict: Verdict, detail: str) -> Any:
        return finished(lease, verdict, detail, self.settings.worker_name)

    async def _put_back(self, lease: Lease, *, tried: bool) -> None:
        """For another try, here or elsewhere. If Redis cannot be told, the reconciler will."""

        def put_back(store: Store) -> None:
            store.release([lease], tried=tried)
            try:
                celery.publish([(lease.job_id, lease.spec.priority)], 1)
                store.mark_published([lease.job_id])
            except celery.UNREACHABLE as error:
                log.warning("a job put back could not be announced: %s", error, extra=_ids(lease, "announce_failed"))

        await self._ledger.call(put_back)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self._engine.call(self._engine.sweep)
            except (SandboxLost, SetupError) as error:
                log.warning("could not sweep: %s", error, extra={"action": "sweep_failed"})

    async def _tear_down(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if hasattr(self, "_pool"):
            await self._pool.close()
            self._engine.close()
            self._reconciler.close()
            self._bell.close()
        if hasattr(self, "_ledger"):
            self._ledger.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _ids(lease: Lease, action: str) -> dict[str, Any]:
    return {"action": action, "job": lease.job_id, "batch": lease.batch_id, "attempt": lease.attempt}
