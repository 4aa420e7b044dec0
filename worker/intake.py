"""Which jobs a worker takes, and how many. Woken by a message or by itself, it claims until nothing is left for it."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from sqlalchemy.exc import DBAPIError

from schemas import fleet, images
from schemas.images import made_by
from schemas.lease import Lease
from schemas.settings import Settings
from schemas.store import Store
from worker.announcer import Announcer
from worker.breaker import Breaker
from worker.inventory import Inventory
from worker.lease import GIVEN_BACK, Leases
from worker.ledger import Ledger
from worker.pool import Pool

log = logging.getLogger("evalpool.intake")

CLAIM_SECONDS = 0.5
"""How much work is claimed ahead: what is claimed is kept from other workers."""
IDLE_SECONDS = 1.0
"""How long a claimed job may wait for a sandbox here before it goes back: another worker may be free."""
LOCKED_SECONDS = 0.05
"""After which time to ask again for jobs that somebody had locked."""
UNKNOWN_SECONDS = 600.0
"""How long a job is left to others whose image is not here, if there are too many such images to remember them."""
PINS = 1000
"""Batches of which it is remembered what their images' names mean."""


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
        """What a job takes, of late."""
        self._open = True
        self._asking = 0
        """How many wake-ups are about to claim jobs. One that waits for the end of jobs that it has claimed is none of
        them: that may take hours, in which the other slots are free."""
        self._claiming = asyncio.Lock()
        self._freed = asyncio.Event()
        """Set when a job is over, and there may be room for others."""
        self._pins: dict[tuple[str, str], str] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def follow(self) -> None:
        """The way of a wake-up: claim jobs by their turns and run them, until nothing is left for this worker."""
        while tasks := await self._next():
            # Not `gather`: one that was stopped twice must not end this, or nobody asks for what waits behind it.
            await asyncio.wait(tasks)

    def look(self) -> None:
        """Look for jobs without a message: it may be lost, or may have reached only workers that cannot run them."""
        if not self._asking and self._room():
            task = asyncio.get_running_loop().create_task(self.follow())
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def over(self, seconds: float | None = None) -> None:
        """A job is over; one that was run took so long."""
        if seconds is not None:
            self._usual_seconds += (max(seconds, 0.001) - self._usual_seconds) / 16
        self._freed.set()

    def close(self) -> None:
        """Take no more."""
        self._open = False
        self._freed.set()

    async def closed(self) -> None:
        """When the jobs that no message has asked for are over, too: nobody else waits for them."""
        await asyncio.gather(*self._background)

    async def keep(self) -> None:
        """For ever: jobs that were expected to begin at once, and did not, go back to the queue."""
        while True:
            await asyncio.sleep(IDLE_SECONDS / 4)
            late = time.monotonic() - IDLE_SECONDS
            held = self._leases.held()
            idle = [(lease, task) for lease, task in held if lease.claimed < late and not self._pool.begun(task)]
            if not idle or not self._open:
                continue
            # So long that nothing is claimed ahead, until jobs turn out to be shorter: else it would be these again.
            self._usual_seconds = max(self._usual_seconds, 2 * self._settings.slots * CLAIM_SECONDS)
            for _, task in idle:
                task.cancel(GIVEN_BACK)
            log.info("%d jobs have waited too long here", len(idle), extra={"action": "given_back"})
            try:
                await self._ledger.call(Store.put_back, [lease for lease, _ in idle], self._settings.worker_name)
            except DBAPIError as error:  # then their leases run out by themselves
                self._database.trip(str(error.orig))
            self._announcer.wake(f"{len(idle)} jobs given back")

    async def _next(self) -> list["asyncio.Task[None]"]:
        """The next jobs, begun; none when nothing is left for this worker, or when it takes no more."""
        self._asking += 1
        try:
            while await self._able():
                async with self._claiming:
                    if count := min(self._room(), self._settings.chunk):
                        return await self._claim(count)
            return []
        finally:
            self._asking -= 1

    def _room(self) -> int:
        """How many more jobs to claim: what the slots need, and what they get done in a moment. Long jobs are claimed
        one by one, so that others need not wait behind them; short ones when half of the stock is used up."""
        slots, held = self._settings.slots, len(self._leases)
        ahead = int(slots * CLAIM_SECONDS / self._usual_seconds)
        return slots + ahead - held if held < slots or held <= slots + ahead // 2 else 0

    async def _able(self) -> bool:
        """Wait until this worker can take jobs; False when it takes no more. Before it waits, it passes the wake-up on,
        as others may be free. It cannot get it back: a wake-up that waits here occupies one of its few threads."""
        if not (self._open and self._room() and all(need.is_closed for need in self._needs)):
            self._announcer.wake("passed on by a busy worker")
        for need in self._needs:
            await need.closed()
        while self._open and not self._room():
            self._freed.clear()
            await self._freed.wait()
        return self._open

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
                if not self._open:
                    return []
                continue
            if claim.unreadable:
                job_id, why = next(iter(claim.unreadable.items()))
                log.warning(
                    "%d jobs are left to workers of another version, as this one cannot read them: %s",
                    len(claim.unreadable), why, extra={"action": "unreadable", "job": job_id},
                )  # fmt: skip
            if claim.count == count:  # there may be more, and others may be free
                self._announcer.wake("more jobs wait")
            if claim.passed_over and not leases:  # he who has locked them may never say that he has let go
                await asyncio.sleep(LOCKED_SECONDS)
                if self._open:
                    continue
            elif claim.passed_over:
                self._announcer.wake("jobs were locked")
            if leases or not claim.count:
                tasks = [asyncio.get_running_loop().create_task(self._run(lease)) for lease in leases]
                for lease, task in zip(leases, tasks, strict=True):
                    self._leases.hold(lease, task)
                return tasks

    async def _settle(self, claimed: list[Lease]) -> list[Lease]:
        """The leases whose image is here, each with its digest. The others are put back."""
        settled: list[Lease] = []
        absent: dict[float, list[Lease]] = {}
        for lease in claimed:
            image = lease.image or images.wanted(lease.spec, self._settings)
            name, digest = images.name_of(image), images.digest_of(image)
            if digest is None and (local := self._inventory.resolve(name)):
                digest = await self._pin(lease.batch_id, name, local)
            # A row of an older version names no image, and so cannot be left out of the next claim.
            if lease.image is None or (digest and digest in self._inventory.digests):
                settled.append(replace(lease, image=images.pinned(name, digest)))
            else:
                shun = 0.0 if self._inventory.miss(image) else UNKNOWN_SECONDS
                absent.setdefault(shun, []).append(lease)
        others = [lease.job_id for lease in settled if lease.digest not in (None, self._digest(lease))]
        if others:
            await self._ledger.call(Store.disown, others)
        for shun, leases in absent.items():
            await self._ledger.call(Store.put_back, leases, self._settings.worker_name, shun)
        return settled

    def _digest(self, lease: Lease) -> str:
        """Of what decides the result of a job if this worker runs it. At its submission, no worker may have been there,
        or others, which run programs in another way."""
        return lease.spec.digest(made_by(str(lease.image), fleet.profile(self._settings)))

    async def _pin(self, batch_id: str, name: str, local: str) -> str:
        """What this name of an image means to a batch, if that was not decided at its submission."""
        known = self._pins.get((batch_id, name))
        if known is None:
            known = await self._ledger.call(Store.pin, batch_id, name, local)
            if len(self._pins) >= PINS:
                self._pins.clear()
            self._pins[batch_id, name] = known
        return known
