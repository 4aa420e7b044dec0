"""What one worker process owns (the event loop in its own thread, the pool, the leases, the recorder), and what it does
when it is woken: claim, evaluate, record, until nothing is left for it."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
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
from worker.inventory import Inventory
from worker.lease import CANCELLED, GIVEN_BACK, PUT_BACK, Leases
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
CLAIM_SECONDS = 0.5
"""How much work is claimed ahead: what is claimed is kept from other workers."""
IDLE_SECONDS = 1.0
"""How long a claimed job may wait for a sandbox here before it goes back: another worker may be free."""
PINS = 1000
"""Batches of which it is remembered what their images' names mean."""

LETTER = 4096
"""How much is kept of a message that nobody can read."""
SHUN_SECONDS = 1.0
"""How long a worker leaves a job that it failed with to others."""

T = TypeVar("T")


class Runner:
    """Built when a worker starts, closed when it ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="evalpool-loop", daemon=True)
        self._keepers: list[asyncio.Task[None]] = []
        self._without_agent: set[str] = set()
        self._usual_seconds = 0.01
        """What a job takes, of late."""
        self._at_work = 0
        """How many are claiming and running jobs, each for a wake-up."""
        self._claiming = asyncio.Lock()
        self._freed = asyncio.Event()
        """Set when a job is over, and this worker may have room for others."""
        self._pins: dict[tuple[str, str], str] = {}
        self._background: set[asyncio.Task[None]] = set()
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
        """Called from Celery's threads: takes jobs until nothing is left, and returns when each is committed or put
        back."""
        self._call(self._work())

    def bury(self, reason: str, message: object) -> None:
        """Put a message aside that nobody can read."""
        log.error("a message was put aside: %s", reason[:200], extra={"action": "bad_message"})
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
        self._inventory = Inventory(self._engine)
        self._pool = Pool(self._make, settings.slots, settings.max_uses)
        self._leases = Leases(self._ledger, settings.worker_name, settings.lease_seconds)
        self._recorder = Recorder(self._ledger, self._announcer, self._leases.__len__, settings.worker_name)
        self._reconciler = Reconciler(
            self._ledger, self._announcer, settings, report=self._report, work=self._work_unasked
        )
        try:
            await self._engine.call(self._engine.sweep)
            await self._inventory.refresh()
            await self._pool.warm(Shape(self._inventory.pin(settings.image), 512, 64, 64))
        except SandboxLost as error:
            raise SetupError(f"no sandbox can be started here: {error}") from error
        await self._ledger.call(Store.retire, settings.worker_name)
        keepers = (
            self._recorder.keep(), self._leases.keep(), self._reconciler.keep(), self._sweep(), self._give_back(),
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

    def _work_unasked(self) -> None:
        """Look for jobs without a message: it may be lost, or may have reached only workers that cannot run them."""
        if not self._at_work and self._room():
            task = self._loop.create_task(self._work())
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _work(self) -> None:
        """The way of a wake-up: claim jobs by their turns and run them, until nothing is left for this worker."""
        self._at_work += 1
        try:
            while await self._able():
                async with self._claiming:
                    count = min(self._room(), self.settings.chunk)
                    tasks = await self._claim(count) if count else []
                if count and not tasks:
                    return
                await asyncio.gather(*tasks)
        finally:
            self._at_work -= 1

    async def _able(self) -> bool:
        """Wait until this worker can take jobs; False when it takes no more. Meanwhile the wake-up is passed on, as
        others may be free: this worker comes to be out of free threads, and so takes no more messages."""
        if self._draining or not (self._room() and self._docker.is_closed and self._database.is_closed):
            self._announcer.wake("passed on by a busy worker")
        await self._docker.closed()
        await self._database.closed()
        while not self._draining and not self._room():
            self._freed.clear()
            await self._freed.wait()
        return not self._draining

    async def _claim(self, count: int) -> list["asyncio.Task[None]"]:
        """Claim so many jobs, if there are, and begin with them. Those whose image is not here go back untried, and
        others are claimed in their place."""
        while True:
            try:
                claim = await self._leases.claim(count, self._inventory.absent)
                leases = await self._settle(claim.leases)
            except DBAPIError as error:
                self._database.trip(str(error.orig))
                await self._database.closed()
                if self._draining:
                    return []
                continue
            if claim.unreadable:
                job_id, why = next(iter(claim.unreadable.items()))
                log.warning(
                    "%d jobs are left to workers of a newer version, as this one cannot read them: %s",
                    len(claim.unreadable), why, extra={"action": "unreadable", "job": job_id},
                )  # fmt: skip
            if claim.count == count:  # there may be more, and others may be free
                self._announcer.wake("more jobs wait")
            if leases or not claim.count:
                tasks = [self._loop.create_task(self._one(lease)) for lease in leases]
                for lease, task in zip(leases, tasks, strict=True):
                    self._leases.hold(lease, task)
                return tasks

    async def _settle(self, claimed: list[Lease]) -> list[Lease]:
        """The leases whose image is here, each with its digest. The others are put back."""
        settled, absent = [], []
        for lease in claimed:
            image = lease.image or images.wanted(lease.spec, self.settings)
            name, digest = images.name_of(image), images.digest_of(image)
            if digest is None and (local := self._inventory.resolve(name)):
                digest = await self._pin(lease.batch_id, name, local)
            if lease.image is None or (digest and digest in self._inventory.digests):
                settled.append(replace(lease, image=images.pinned(name, digest)))
            else:
                self._inventory.miss(image)
                absent.append(lease)
        if absent:
            await self._ledger.call(Store.put_back, absent, self.settings.worker_name)
        return settled

    async def _pin(self, batch_id: str, name: str, local: str) -> str:
        """What this name of an image means to a batch, if that was not decided at its submission."""
        known = self._pins.get((batch_id, name))
        if known is None:
            known = await self._ledger.call(Store.pin, batch_id, name, local)
            if len(self._pins) >= PINS:
                self._pins.clear()
            self._pins[batch_id, name] = known
        return known

    def _room(self) -> int:
        """How many more jobs to claim: what the slots need, and what they get done in a moment. Long jobs are claimed
        one by one, so that others need not wait behind them; short ones when half of the stock is used up."""
        slots, held = self.settings.slots, len(self._leases)
        ahead = int(slots * CLAIM_SECONDS / self._usual_seconds)
        return slots + ahead - held if held < slots or held <= slots + ahead // 2 else 0

    async def _give_back(self) -> None:
        """For ever: jobs that were expected to begin at once, and did not, go back to the queue."""
        while True:
            await asyncio.sleep(IDLE_SECONDS / 4)
            begun = time.monotonic() - IDLE_SECONDS
            idle = [
                (lease, task)
                for lease, task in self._leases.held()
                if lease.claimed < begun and not self._pool.begun(task)
            ]
            if not idle or self._draining:
                continue
            self._usual_seconds = max(self._usual_seconds, CLAIM_SECONDS)
            for _, task in idle:
                task.cancel(GIVEN_BACK)
            log.info("%d jobs wait too long here", len(idle), extra={"action": "given_back"})
            try:
                await self._ledger.call(Store.put_back, [lease for lease, _ in idle], self.settings.worker_name)
            except DBAPIError as error:  # then their leases run out by themselves
                self._database.trip(str(error.orig))
            self._announcer.wake(f"{len(idle)} jobs given back")

    async def _report(self) -> Member:
        """What this worker says of itself."""
        await self._inventory.refresh()
        return Member.of(self.settings, self._inventory.names, self._inventory.digests)

    async def _one(self, lease: Lease) -> None:
        """The way of a job, once it is ours."""
        try:
            local = self.settings.model_copy(update={"image": self._inventory.pin(self.settings.image)})
            result = await evaluate(lease, self._pool, self._artifacts, local)
            self._usual_seconds += (max(result.metrics.wall_seconds, 0.001) - self._usual_seconds) / 16
            await self._recorder.record(result)
            log.info("%s", result.detail, extra=_ids(lease, "job_finished") | {"verdict": result.verdict.value})
        except PoolClosed:
            await self._put_back(lease)
        except NoSandbox as error:
            self._docker.trip(str(error))
            await self._put_back(lease)
        except ImageMissing:
            await self._inventory.refresh()
            self._inventory.miss(str(lease.image))
            await self._put_back(lease)
        except asyncio.CancelledError as stop:
            if CANCELLED in stop.args:
                await self._recorder.record(self._ended(lease, Verdict.CANCELLED, "cancelled while it ran"))
            elif PUT_BACK in stop.args:
                await self._put_back(lease)
            elif GIVEN_BACK not in stop.args:
                log.warning("another worker has taken the job over", extra=_ids(lease, "lease_lost"))
        except EvalpoolError as error:
            log.warning("attempt %d failed: %s", lease.attempt, error, extra=_ids(lease, "attempt_failed"))
            await self._failed(lease, str(error))
        except Exception as error:  # a bug of ours: it costs an attempt, and must not leave the job hanging
            log.exception("attempt %d failed by a bug", lease.attempt, extra=_ids(lease, "bug"))
            await self._failed(lease, repr(error))
        finally:
            self._leases.drop(lease)
            self._freed.set()

    async def _letters(self) -> int | None:
        try:
            return await self._ledger.call(Store.letters)
        except DBAPIError:  # it is away, and that is said already
            return None

    def _drain(self, grace: float) -> None:
        self._pool.stop_lending()
        self._docker.close()
        self._database.close()
        self._freed.set()
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
        await self._return(lease, Store.release, lease, failure, SHUN_SECONDS)
        await asyncio.sleep(SHUN_SECONDS)  # if there is another worker, it has taken it by now; else we try again
        self._announcer.wake("a job put back")

    async def _put_back(self, lease: Lease) -> None:
        """For another worker: it was not tried here."""
        await self._return(lease, Store.put_back, [lease], self.settings.worker_name)

    async def _return(self, lease: Lease, query: Callable[..., None], *args: Any) -> None:
        try:
            await self._ledger.call(query, *args)
        except DBAPIError as error:  # then its lease runs out by itself
            self._database.trip(str(error.orig))
        self._leases.drop(lease)
        self._announcer.wake("a job put back")

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
