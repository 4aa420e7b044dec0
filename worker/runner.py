"""One worker process: its event loop in a thread, its pool, leases and recorder. When it is woken, it claims, evaluates
and records jobs until none is left that it can run."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError

from evalpool.schemas import images
from evalpool.schemas.database import Database
from evalpool.schemas.errors import EvalpoolError, ImageMissing, NoSandbox, PoolClosed, SandboxLost, SetupError
from evalpool.schemas.fleet import Member
from evalpool.schemas.lease import Lease
from evalpool.schemas.settings import Settings
from evalpool.schemas.store import Store
from evalpool.schemas.verdict import Verdict
from evalpool.worker.artifacts import Artifacts
from evalpool.worker.breaker import Breaker
from evalpool.worker.evaluation import evaluate, finished
from evalpool.worker.imports import Imports
from evalpool.worker.intake import Intake
from evalpool.worker.inventory import Inventory
from evalpool.worker.lease import Leases, Stop
from evalpool.worker.ledger import Ledger
from evalpool.worker.pool import Pool, preloaded, size
from evalpool.worker.queue.announcer import Announcer
from evalpool.worker.reconciler import Reconciler
from evalpool.worker.recorder import Recorder
from evalpool.worker.sandbox.base import Box, Shape
from evalpool.worker.sandbox.engine import Engine
from evalpool.worker.sandbox.factory import Containers

log = logging.getLogger("evalpool.runner")

SWEEP_SECONDS = 10.0
LETTER = 4096
"""How many characters are kept of a dead letter, a message that nobody can read."""
SHUN_SECONDS = 1.0
"""How long a worker leaves a job to others after it has failed to run it."""
MISSING_SECONDS = 15.0
"""How long a worker leaves a job to others whose image was missing when it was to run. Rows of older versions do not
name their image, so that the next claim cannot skip them."""

T = TypeVar("T")


class Runner:
    """Everything that one worker process owns. It is built when the worker starts, and closed when it ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="evalpool-loop", daemon=True)
        self._keepers: list[asyncio.Task[None]] = []
        self._draining = False
        self._closed = False

    def start(self) -> None:
        """Open the ledger, remove old sandboxes and warm the pool. Raises `SetupError` or `SchemaMismatch` if this
        machine cannot run jobs."""
        database = Database(self.settings.store_url, upgrade=self.settings.database_url is None)
        store = Store(database, self.settings.fleet or "")
        self._thread.start()
        try:
            self._call(self._build(store))
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Claim and run jobs until none is left. Returns when each of them is committed or put back. Celery's threads
        call this."""
        self._call(self._intake.follow())

    def bury(self, reason: str, message: object) -> None:
        """Keep a message that nobody can read as a dead letter."""
        log.error("a message could not be read: %s", reason[:200], extra={"action": "bad_message"})
        # While it was in the queue, it passed for a wake-up, and no other was sent.
        self._announcer.wake("a message that nobody could read")
        reason, body = ascii(reason)[1:-1][:LETTER], ascii(message)[:LETTER]
        try:
            self._call(self._ledger.call(Store.bury, self.settings.worker_name, reason, body))
        except DBAPIError as error:
            log.warning("the message could not be kept: %s", error.orig, extra={"action": "bury_failed"})

    def drain(self) -> None:
        """Take no new jobs, and finish those that run within the grace period. A second call puts them back at once.

        This may be called in a signal handler.
        """
        again, self._draining = self._draining, True
        self._loop.call_soon_threadsafe(self._drain, 0.0 if again else self.settings.grace_seconds)

    @property
    def draining(self) -> bool:
        """Whether this worker was told to stop."""
        return self._draining

    def snapshot(self) -> dict[str, Any]:
        """The state of this worker, for `celery -A worker inspect sandbox_pool`."""

        async def look() -> dict[str, Any]:
            return {
                "worker": self.settings.worker_name,
                "slots": self.settings.slots,
                "running": sum(self._pool.begun(held.task) for held in self._leases.held()),
                "claimed": len(self._leases),
                "draining": self._draining,
                "docker": self._docker.state,
                "database": self._database.state,
                "letters": await self._letters(),
                "absent_images": sorted(self._inventory.absent),
                "reconciler": dict(self._reconciler.counts),
                **self._pool.snapshot(),
            }

        return self._call(look())

    def close(self) -> None:
        """Destroy the sandboxes, close the ledger and end the loop. A second call does nothing."""
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
        self._announcer = Announcer(settings)
        self._engine = Engine(settings.docker_timeout)
        self._containers = Containers(self._engine, settings)
        self._docker = Breaker("the Docker engine", lambda: self._engine.call(self._engine.ping, settings.image))
        self._database = Breaker("the database", lambda: self._ledger.call(Store.ping))
        self._artifacts, self._imports = Artifacts(), Imports()
        self._trying = asyncio.Lock()
        self._inventory = Inventory(self._engine)
        slots, most = settings.slots, size(settings.slots, settings.idle)
        self._pool = Pool(self._make, slots, settings.max_uses, size=most, preloaded=preloaded(slots))
        self._leases = Leases(self._ledger, settings.worker_name, settings.lease_seconds)
        self._recorder = Recorder(self._ledger, self._announcer, self._leases.__len__, settings.worker_name)
        self._intake = Intake(
            settings, self._ledger, self._leases, self._announcer, self._inventory, self._pool,
            needs=(self._docker, self._database), run=self._one,
        )  # fmt: skip
        self._reconciler = Reconciler(
            self._ledger, self._announcer, settings, report=self._report, work=self._intake.look
        )
        try:
            await self._engine.call(self._engine.sweep)
            await self._refresh()
            await self._pool.warm(self._usual_shape())
        except SandboxLost as error:
            raise SetupError(f"no sandbox can be started on this machine: {error}") from error
        await self._ledger.call(Store.retire, settings.worker_name)
        keepers = (
            self._recorder.keep(), self._leases.keep(), self._reconciler.keep(), self._sweep(), self._intake.keep(),
        )  # fmt: skip
        self._keepers = [asyncio.create_task(keeper) for keeper in keepers]

    async def _make(self, shape: Shape) -> Box:
        """Return a started sandbox. Raises `NoSandbox` if even the default image is not fit, as no job can run then."""
        try:
            return await self._containers.start(shape)
        except SetupError as error:
            if images.name_of(shape.image) != self.settings.image:
                raise  # the job has named this image, and other jobs can run
            missing = isinstance(error, ImageMissing)
            name = self.settings.image
            remedy = f"there is no image {name}; {images.remedy(name, self.settings)}"
            raise NoSandbox(remedy if missing else str(error)) from error

    async def _refresh(self) -> None:
        """List the images of the engine again, and pin the default image for all jobs until the next time."""
        await self._inventory.refresh()
        self._pinned = self.settings.model_copy(update={"image": self._inventory.pin(self.settings.image)})

    async def _report(self) -> Member:
        """Return what this worker reports about itself."""
        await self._refresh()
        return Member.of(self.settings, self._inventory.names, self._inventory.digests)

    async def _one(self, lease: Lease) -> None:
        """Evaluate a job that this worker has claimed, and record its result; or else say why there is none."""
        try:
            result = await evaluate(lease, self._pool, self._artifacts, self._pinned, self._imports)
            self._intake.over(result.metrics.wall_seconds)
            await self._recorder.record(result)
            log.info("%s", result.detail, extra=_ids(lease, "job_finished") | {"verdict": result.verdict.value})
        except PoolClosed:
            await self._put_back(lease)
        except NoSandbox as error:
            await self._without_sandbox(lease, error)
        except ImageMissing:
            await self._refresh()
            self._inventory.miss(str(lease.image))
            await self._put_back(lease, MISSING_SECONDS)
        except asyncio.CancelledError:
            await self._stopped(lease)
        except EvalpoolError as error:
            log.warning("attempt %d failed: %s", lease.attempt, error, extra=_ids(lease, "attempt_failed"))
            await self._failed(lease, str(error))
        except Exception as error:  # a bug of ours, which costs an attempt but must not leave the job without an end
            log.exception("attempt %d failed because of a bug", lease.attempt, extra=_ids(lease, "bug"))
            await self._failed(lease, repr(error))
        finally:
            self._leases.drop(lease)
            self._intake.over()

    async def _stopped(self, lease: Lease) -> None:
        """End a job whose task was cancelled, as the reason demands."""
        reason = self._leases.stopped(lease)
        if reason is Stop.CANCELLED:
            await self._recorder.record(self._ended(lease, Verdict.CANCELLED, "cancelled while it ran"))
        elif reason is Stop.PUT_BACK:
            await self._put_back(lease)
        else:
            log.warning("another worker has taken the job over", extra=_ids(lease, "lease_lost"))

    async def _without_sandbox(self, lease: Lease, error: NoSandbox) -> None:
        """Fail the attempt if only this job can get no sandbox. If no job can, put it back and take no more."""
        if await self._own_fault(lease):
            await self._failed(lease, str(error))
        else:
            self._docker.trip(str(error))
            await self._put_back(lease)

    async def _letters(self) -> int | None:
        try:
            return await self._ledger.call(Store.letters)
        except DBAPIError:  # the database is away, and the snapshot shows it
            return None

    def _drain(self, grace: float) -> None:
        self._pool.stop_lending()
        self._docker.close()
        self._database.close()
        self._intake.close()
        self._loop.call_later(grace, self._leases.stop, Stop.PUT_BACK)

    def _ended(self, lease: Lease, verdict: Verdict, detail: str) -> Any:
        return finished(lease, verdict, detail, self.settings.worker_name)

    async def _failed(self, lease: Lease, why: str) -> None:
        """Requeue a job after a failure of ours; after the last attempt, record `sandbox_error`."""
        failure = f"attempt {lease.attempt} on {self.settings.worker_name}: {why}"
        if lease.attempt >= self.settings.max_attempts:
            detail = f"given up: {_history([*lease.failures, failure])}"[:2000]
            await self._recorder.record(self._ended(lease, Verdict.SANDBOX_ERROR, detail))
            return
        await self._return(lease, Store.release, lease, self.settings.worker_name, failure, SHUN_SECONDS)
        await asyncio.sleep(SHUN_SECONDS)  # another worker, if there is one, has taken the job by now
        self._announcer.wake("a job put back")

    async def _own_fault(self, lease: Lease) -> bool:
        """Whether only this job can get no sandbox, for example because its image has no shell. This costs the job an
        attempt. Other jobs must not wait, as they would if the engine were away."""
        if images.name_of(str(lease.image)) == self.settings.image:
            return False
        async with self._trying:
            if not self._docker.is_closed:
                return False
            try:
                usual = await self._make(self._usual_shape())
            except EvalpoolError:
                return False
            await usual.close()
            return True

    def _usual_shape(self) -> Shape:
        return Shape(self._pinned.image, 512, 64, 64)

    async def _put_back(self, lease: Lease, shun: float = 0) -> None:
        """Requeue a job that was not tried here."""
        await self._return(lease, Store.put_back, [lease], self.settings.worker_name, shun)

    async def _return(self, lease: Lease, query: Callable[..., None], *args: Any) -> None:
        self._leases.drop(lease)  # first: a job that is being requeued must not be stopped or taken for lost
        try:
            await self._ledger.call(query, *args)
        except DBAPIError as error:  # then the lease of the job expires by itself
            self._database.trip(str(error.orig))
        self._announcer.wake("a job put back")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self._engine.call(self._engine.sweep)
            except (SandboxLost, SetupError) as error:
                log.warning("old sandboxes could not be removed: %s", error, extra={"action": "sweep_failed"})

    async def _tear_down(self) -> None:
        if hasattr(self, "_intake"):
            if not self._draining:
                self._drain(0.0)
            await self._intake.closed()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if hasattr(self, "_pool"):
            await self._pool.close()
            with suppress(SandboxLost, SetupError):  # of sandboxes that could not be removed, or that came too late
                await self._engine.call(self._engine.sweep)
            self._engine.close()
            self._announcer.close()
        if hasattr(self, "_ledger"):
            with suppress(DBAPIError):
                await self._ledger.call(Store.retire, self.settings.worker_name)
            self._ledger.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _history(failures: Sequence[str]) -> str:
    """Return what went wrong, each reason once and with its attempts."""
    reasons: dict[str, list[str]] = {}
    for failure in failures:
        where, _, why = failure.partition(": ")
        reasons.setdefault(why or where, []).append(where)
    return "; ".join(f"{why} ({', '.join(attempts)})" for why, attempts in reasons.items())


def _ids(lease: Lease, action: str) -> dict[str, Any]:
    return {"action": action, "job": lease.job_id, "batch": lease.batch_id, "attempt": lease.attempt}
