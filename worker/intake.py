"""Which jobs a worker claims, and how many. A message or its own polling wakes it; then it claims until nothing is left
that it can run."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy.exc import DBAPIError

from evalpool.schemas import fleet, images
from evalpool.schemas.lease import Claim, Lease
from evalpool.schemas.settings import Settings
from evalpool.schemas.store import Store
from evalpool.worker.breaker import Breaker
from evalpool.worker.inventory import Inventory
from evalpool.worker.lease import Leases, Stop
from evalpool.worker.ledger import Ledger
from evalpool.worker.pool import Pool
from evalpool.worker.queue.announcer import Announcer

log = logging.getLogger("evalpool.intake")

CLAIM_SECONDS = 0.5
"""How much work is claimed ahead. It is little, since no other worker can take what is claimed."""
IDLE_SECONDS = 1.0
"""How long a claimed job may wait for a sandbox before it is given back, as another worker may be free."""
LOCKED_SECONDS = 0.05
"""How long to wait before asking again for jobs that another transaction had locked."""
UNKNOWN_SECONDS = 600.0
"""How long a job is left to other workers if its image is absent and too many absent images are remembered already."""
PINS = 1000
"""How many pinned images are cached."""


class Started(NamedTuple):
    """The jobs of one claim."""

    tasks: list["asyncio.Task[None]"]
    more: bool
    """Whether more jobs may have been waiting. If not, a later job comes with a wake-up of its own."""


NOTHING = Started([], more=False)


class Intake:
    """Claims jobs for the slots of one worker, and hands each to `run`."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        leases: Leases,
        announcer: Announcer,
        inventory: Inventory,
        pool: Pool,
        *,
        needs: tuple[Breaker, ...],
        run: Callable[[Lease], Coroutine[Any, Any, None]],
    ) -> None:
        self._settings, self._ledger, self._leases, self._announcer = settings, ledger, leases, announcer
        self._inventory, self._pool, self._needs, self._run = inventory, pool, needs, run
        self._database = needs[-1]
        self._usual_seconds = 0.01
        """Moving average of the run time of a job."""
        self._open = True
        self._asking = 0
        """How many wake-ups are about to claim jobs. A wake-up that waits for the jobs it has claimed does not count:
        they may take hours, and the other slots are free meanwhile."""
        self._claiming = asyncio.Lock()
        self._lined_up = False
        """Whether a wake-up waits for another one's claim to end."""
        self._freed = asyncio.Event()
        """Set when a job is over, so that there may be room for another."""
        self._pins: dict[tuple[str, str], str] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._given_back: set[str] = set()
        """The jobs that were given back last."""

    async def follow(self) -> None:
        """Handle a wake-up: claim jobs in the order of their turns and run them, until none is left for this worker."""
        more = True
        while more and (started := await self._next()).tasks:
            # Not `gather`: it would raise the cancellation of a job, and nobody would claim the jobs that wait.
            await asyncio.wait(started.tasks)
            more = started.more

    def look(self) -> None:
        """Look for jobs without a message. It may be lost, or may have reached only workers that cannot run them."""
        if not self._asking and self._room():
            task = asyncio.get_running_loop().create_task(self.follow())
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def over(self, seconds: float | None = None) -> None:
        """Note that a job is over; `seconds` is its run time, if it was run."""
        if seconds is not None:
            self._usual_seconds += (max(seconds, 0.001) - self._usual_seconds) / 16
        self._freed.set()

    def close(self) -> None:
        """Claim no more jobs."""
        self._open = False
        self._freed.set()

    async def closed(self) -> None:
        """Wait for the jobs that were claimed without a message, since no Celery thread waits for them."""
        await asyncio.gather(*self._background)

    async def keep(self) -> None:
        """For ever: give back claimed jobs that have waited for a sandbox longer than `IDLE_SECONDS`."""
        while True:
            await asyncio.sleep(IDLE_SECONDS / 4)
            late = time.monotonic() - IDLE_SECONDS
            idle = [
                held
                for held in self._leases.held()
                if held.since < late and not self._pool.begun(held.task) and held.stopped is None
            ]
            if idle and self._open:
                # So long that nothing is claimed ahead until jobs turn out to be shorter. Else the same jobs would be
                # claimed again.
                self._usual_seconds = max(self._usual_seconds, 2 * self._settings.slots * CLAIM_SECONDS)
                # The same job comes back every second while another one runs alone. That is news once.
                if not {held.lease.job_id for held in idle} <= self._given_back:
                    jobs = "1 job is" if len(idle) == 1 else f"{len(idle)} jobs are"
                    log.info("%s given back after waiting for a slot", jobs, extra={"action": "given_back"})
                self._given_back = {held.lease.job_id for held in idle}
                for held in idle:
                    held.stop(Stop.PUT_BACK)

    async def _next(self) -> "Started":
        """Claim and start the next jobs: none if none is left for this worker, or if it takes no more."""
        self._asking += 1
        try:
            while await self._able():
                if self._lined_up:  # the next claim, which has not begun, is for all wake-ups that have come by then
                    return NOTHING
                async with self._next_claim():
                    if count := min(self._room(), self._settings.chunk):
                        return await self._claim(count)
            return NOTHING
        finally:
            self._asking -= 1

    @asynccontextmanager
    async def _next_claim(self) -> AsyncIterator[None]:
        """Wait until no other wake-up is claiming."""
        self._lined_up = True
        try:
            await self._claiming.acquire()
        finally:
            self._lined_up = False
        try:
            yield
        finally:
            self._claiming.release()

    def _room(self) -> int:
        """How many more jobs to claim: enough for the slots, and what they finish in `CLAIM_SECONDS`. Long jobs are
        claimed one by one, so that none waits here while another worker is idle. Short jobs are claimed in bulk, when
        half of the stock is used up."""
        slots, held = self._settings.slots, len(self._leases)
        ahead = int(slots * CLAIM_SECONDS / self._usual_seconds)
        return slots + ahead - held if held < slots or held <= slots + ahead // 2 else 0

    async def _able(self) -> bool:
        """Wait until this worker can take jobs; False if it is closing. Before it waits, it sends another wake-up, as
        other workers may be free. This cannot go on for ever: each waiting wake-up occupies one of the worker's few
        Celery threads, and when all are occupied it receives no more messages."""
        if not (self._open and self._room() and all(need.is_closed for need in self._needs)):
            self._announcer.wake("passed on by a busy worker")
        for need in self._needs:
            await need.closed()
        while self._open and not self._room():
            self._freed.clear()
            await self._freed.wait()
        return self._open

    async def _claim(self, count: int) -> "Started":
        """Claim up to `count` jobs and start them. Jobs whose image is not here are put back untried; if none is left
        then, others are claimed."""
        while True:
            try:
                claim = await self._leases.claim(count, self._inventory.absent)
                leases = await self._settle(claim.leases)
            except DBAPIError as error:
                self._database.trip(str(error.orig))
                await self._database.closed()
                if not self._open:
                    return NOTHING
                continue
            _warn(claim)
            if claim.count == count:  # there may be more jobs, and other workers may be free
                self._announcer.wake("more jobs wait")
            if claim.passed_over and not leases:  # nobody sends a wake-up when the lock is released
                await asyncio.sleep(LOCKED_SECONDS)
                if self._open:
                    continue
            elif claim.passed_over:
                self._announcer.wake("jobs were locked")
            if leases or not claim.count:
                tasks = [asyncio.get_running_loop().create_task(self._begin(lease)) for lease in leases]
                await asyncio.sleep(0)  # until each of them has begun, and counts when the next jobs are claimed
                return Started(tasks, more=claim.count == count)

    async def _begin(self, lease: Lease) -> None:
        self._leases.hold(lease)
        await self._run(lease)

    async def _settle(self, claimed: list[Lease]) -> list[Lease]:
        """The leases whose image is here, each with the digest of the image. The others are put back."""
        settled: list[Lease] = []
        absent: dict[float, list[Lease]] = {}
        for lease in claimed:
            image = lease.image or images.wanted(lease.spec, self._settings)
            name, digest = images.name_of(image), images.digest_of(image)
            if digest is None and (local := self._inventory.resolve(name)):
                digest = await self._pin(lease.batch_id, name, local)
            # A row of an older version has no image, so that later claims could not skip it: it is run in any case.
            if lease.image is None or (digest and digest in self._inventory.digests):
                settled.append(replace(lease, image=images.pinned(name, digest)))
            else:
                shun = 0.0 if self._inventory.miss(image) else UNKNOWN_SECONDS
                absent.setdefault(shun, []).append(lease)
        shared = [lease for lease in settled if lease.digest is not None]
        if shared and (others := await asyncio.to_thread(self._others, shared)):
            await self._ledger.call(Store.disown, others)
        for shun, leases in absent.items():
            await self._ledger.call(Store.put_back, leases, self._settings.worker_name, shun)
        return settled

    def _others(self, leases: list[Lease]) -> list[str]:
        """The ids of the jobs whose digest, if this worker runs them, is not their submitter's: no worker was alive at
        the submission, or workers run programs in different ways. It runs in a thread, since the digests of large jobs
        take long."""
        profile = fleet.profile(self._settings)
        made_by = [images.made_by(str(lease.image), profile) for lease in leases]
        return [
            lease.job_id for lease, made in zip(leases, made_by, strict=True) if lease.digest != lease.spec.digest(made)
        ]

    async def _pin(self, batch_id: str, name: str, local: str) -> str:
        """The digest of this image for a batch whose submission could not pin it."""
        known = self._pins.get((batch_id, name))
        if known is None:
            known = await self._ledger.call(Store.pin, batch_id, name, local)
            if len(self._pins) >= PINS:
                self._pins.clear()
            self._pins[batch_id, name] = known
        return known


def _warn(claim: Claim) -> None:
    """Log that jobs are left to other workers, if this version cannot read them."""
    if claim.unreadable:
        job_id, why = next(iter(claim.unreadable.items()))
        log.warning(
            "%d jobs are left to workers of another version, since this version cannot read them: %s",
            len(claim.unreadable), why, extra={"action": "unreadable", "job": job_id},
        )  # fmt: skip
