"""What one worker process owns (the event loop in its own thread, the pool, the leases, the recorder), and what it does
when it is woken: claim, evaluate, record, until nothing is left for it."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError

from schemas import images
from schemas.database import Database
from schemas.errors import EvalpoolError, NoSandbox, SandboxLost, SetupError
from schemas.fleet import Member
from schemas.lease import Lease
from schemas.settings import Settings
from schemas.store import Store
from schemas.verdict import Verdict
from worker.announcer import Announcer
from worker.artifacts import Artifacts
from worker.breaker import Breaker
from worker.evaluation import evaluate, finished
from worker.intake import Intake
from worker.inventory import Inventory
from worker.lease import CANCELLED, PUT_BACK, Leases
from worker.ledger import Ledger
from worker.pool import Pool, PoolClosed
from worker.reconciler import Reconciler
from worker.recorder import Recorder
from worker.sandbox.base import Sandbox, Shape
from worker.sandbox.docker import DockerSandbox
from worker.sandbox.engine import Engine, ImageMissing, NoAgent
from worker.sandbox.exec import ExecSandbox

log = logging.getLogger("evalpool.runner")

SWEEP_SECONDS = 10.0
LETTER = 4096
"""How much is kept of a message that nobody can read."""
SHUN_SECONDS = 1.0
"""How long a worker leaves a job that it failed with to others."""
MISSING_SECONDS = 15.0
"""How long it leaves one to others whose image was not there when it was to run. Rows of older versions do not say
which image that is, and so cannot be left out of the next claim."""

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
        store = Store(Database(self.settings.store_url, upgrade=self.settings.database_url is None))
        self._thread.start()
        try:
            self._call(self._build(store))
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Called from Celery's threads: claims jobs until none is left, and returns when each is committed or put
        back."""
        self._call(self._intake.follow())

    def bury(self, reason: str, message: object) -> None:
        """Put a message aside that nobody can read."""
        log.error("a message was put aside: %s", reason[:200], extra={"action": "bad_message"})
        # While it was in the queue, it passed for a wake-up, and no other was sent.
        self._announcer.wake("a message that nobody could read")
        reason, body = ascii(reason)[1:-1][:LETTER], ascii(message)[:LETTER]
        try:
            self._call(self._ledger.call(Store.bury, self.settings.worker_name, reason, body))
        except DBAPIError as error:
            log.warning("it could not be kept: %s", error.orig, extra={"action": "bury_failed"})

    def drain(self) -> None:
        """Finish what runs within the grace period, take nothing new; put back at once when asked again.

        Safe in a signal handler.
        """
        again, self._draining = self._draining, True
        self._loop.call_soon_threadsafe(self._drain, 0.0 if again else self.settings.grace_seconds)

    @property
    def draining(self) -> bool:
        """Whether it was told to stop."""
        return self._draining

    def snapshot(self) -> dict[str, Any]:
        """How this worker is, for `celery -A worker inspect sandbox_pool`."""

        async def look() -> dict[str, Any]:
            return {
                "worker": self.settings.worker_name,
                "slots": self.settings.slots,
                "running": len(self._leases),
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
        self._announcer = Announcer(settings)
        self._engine = Engine(settings.docker_timeout)
        self._docker = Breaker("the Docker engine", lambda: self._engine.call(self._engine.ping, settings.image))
        self._database = Breaker("the database", lambda: self._ledger.call(Store.ping))
        self._artifacts = Artifacts()
        self._trying = asyncio.Lock()
        self._inventory = Inventory(self._engine)
        self._pool = Pool(self._make, settings.slots, settings.max_uses)
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
            raise SetupError(f"no sandbox can be started here: {error}") from error
        await self._ledger.call(Store.retire, settings.worker_name)
        keepers = (
            self._recorder.keep(), self._leases.keep(), self._reconciler.keep(), self._sweep(), self._intake.keep(),
        )  # fmt: skip
        self._keepers = [asyncio.create_task(keeper) for keeper in keepers]

    async def _make(self, shape: Shape) -> Sandbox:
        """A started sandbox: with our agent, or without where the image has no Python for it."""
        if shape.image not in self._without_agent:
            sandbox = DockerSandbox(shape, self._engine, settings=self.settings)
            try:
                await sandbox.start()
                return sandbox
            except SetupError as error:
                if images.name_of(shape.image) != self.settings.image:
                    raise  # an image that the job named: its own affair
                raise NoSandbox(str(error)) from error
            except NoAgent as error:
                if shape.image not in self._without_agent:
                    log.warning("no Python in %s: the slow way (%s)", shape.image, error, extra={"action": "no_agent"})
                self._without_agent.add(shape.image)
        fallback = ExecSandbox(shape, self._engine, self.settings.runtime)
        await fallback.start()
        return fallback

    async def _refresh(self) -> None:
        """List the images of the engine again, and pin the default image for all jobs until the next time."""
        await self._inventory.refresh()
        self._pinned = self.settings.model_copy(update={"image": self._inventory.pin(self.settings.image)})

    async def _report(self) -> Member:
        """What this worker reports about itself."""
        await self._refresh()
        return Member.of(self.settings, self._inventory.names, self._inventory.digests)

    async def _one(self, lease: Lease) -> None:
        """The way of a job, once it is ours."""
        try:
            result = await evaluate(lease, self._pool, self._artifacts, self._pinned)
            self._intake.over(result.metrics.wall_seconds)
            await self._recorder.record(result)
            log.info("%s", result.detail, extra=_ids(lease, "job_finished") | {"verdict": result.verdict.value})
        except PoolClosed:
            await self._put_back(lease)
        except NoSandbox as error:
            if await self._own_doing(lease):
                await self._failed(lease, str(error))
            else:
                self._docker.trip(str(error))
                await self._put_back(lease)
        except ImageMissing:
            await self._refresh()
            self._inventory.miss(str(lease.image))
            await self._put_back(lease, MISSING_SECONDS)
        except asyncio.CancelledError as stop:
            if CANCELLED in stop.args:
                await self._recorder.record(self._ended(lease, Verdict.CANCELLED, "cancelled while it ran"))
            elif PUT_BACK in stop.args:
                await self._put_back(lease)
            else:
                log.warning("another worker has taken the job over", extra=_ids(lease, "lease_lost"))
        except EvalpoolError as error:
            log.warning("attempt %d failed: %s", lease.attempt, error, extra=_ids(lease, "attempt_failed"))
            await self._failed(lease, str(error))
        except Exception as error:  # a bug of ours: it costs an attempt, and must not leave the job hanging
            log.exception("attempt %d failed by a bug", lease.attempt, extra=_ids(lease, "bug"))
            await self._failed(lease, repr(error))
        finally:
            self._leases.drop(lease)
            self._intake.over()

    async def _letters(self) -> int | None:
        try:
            return await self._ledger.call(Store.letters)
        except DBAPIError:  # it is away, and that is said already
            return None

    def _drain(self, grace: float) -> None:
        self._pool.stop_lending()
        self._docker.close()
        self._database.close()
        self._intake.close()
        self._loop.call_later(grace, self._leases.stop, PUT_BACK)

    def _ended(self, lease: Lease, verdict: Verdict, detail: str) -> Any:
        return finished(lease, verdict, detail, self.settings.worker_name)

    async def _failed(self, lease: Lease, why: str) -> None:
        """Our own failure: another attempt, or after the last one the end."""
        failure = f"attempt {lease.attempt} on {self.settings.worker_name}: {why}"
        if lease.attempt >= self.settings.max_attempts:
            history = "; ".join([*lease.failures, failure])
            await self._recorder.record(self._ended(lease, Verdict.SANDBOX_ERROR, f"given up: {history}"[:2000]))
            return
        await self._return(lease, Store.release, lease, self.settings.worker_name, failure, SHUN_SECONDS)
        await asyncio.sleep(SHUN_SECONDS)  # if there is another worker, it has taken it by now; else we try again
        self._announcer.wake("a job put back")

    async def _own_doing(self, lease: Lease) -> bool:
        """Whether a sandbox cannot be made for this job alone, for example because its image has no shell, while others
        can be made. That costs the job an attempt. Other jobs must not wait, as they would if the engine were away."""
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
        except DBAPIError as error:  # then its lease runs out by itself
            self._database.trip(str(error.orig))
        self._announcer.wake("a job put back")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self._engine.call(self._engine.sweep)
            except (SandboxLost, SetupError) as error:
                log.warning("could not sweep: %s", error, extra={"action": "sweep_failed"})

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
            with suppress(SandboxLost, SetupError):  # what could not be removed, or came too late
                await self._engine.call(self._engine.sweep)
            self._engine.close()
            self._announcer.close()
        if hasattr(self, "_ledger"):
            with suppress(DBAPIError):
                await self._ledger.call(Store.retire, self.settings.worker_name)
            self._ledger.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _ids(lease: Lease, action: str) -> dict[str, Any]:
    return {"action": action, "job": lease.job_id, "batch": lease.batch_id, "attempt": lease.attempt}
