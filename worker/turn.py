"""The turn of a job in the pool: runs its program fairly, even if sandboxes fail, and keeps one from case to case."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Self

from evalpool.schemas.errors import NoSandbox, SandboxKilled, SandboxLost
from evalpool.worker.pool import Pool
from evalpool.worker.sandbox.base import Box, End, Outcome, Program, Shape

STARVED = 0.1
"""A program that waited for a CPU for more than this share of its wall limit is run again alone."""
PATIENCE = 4
"""In a second run, up to this many times the wall limit may be spent waiting for a CPU or in a pause, since we cannot
stop other programs."""
BUSY = 0.8
"""A program that had the CPU for this share of its wall limit was held up only by its own processes."""
TRIES = 2
"""How many sandboxes are tried within one attempt, as one that breaks at once says little about the next."""
DEATHS = 2
"""How many fresh sandboxes must end by themselves under a program until the program is to blame."""
TURN_SECONDS = 1.0
"""How long a job keeps a sandbox from case to case, as the other jobs wait for its slot."""


class Run(NamedTuple):
    """One run of a program, and of the same program again if the first run was not fair."""

    sandbox: Box
    started: float
    """When the first run began, by the monotonic clock."""
    outcome: Outcome | None
    """`None` if `DEATHS` fresh sandboxes ended by themselves under the program."""
    rerun: bool = False


class Turn:
    """The runs of one job in sandboxes of one shape. A sandbox is kept while the program has more cases to run, and is
    reset between them; it goes back to the pool when the turn is over, and after anything out of the ordinary."""

    def __init__(self, pool: Pool, shape: Shape, *, fresh: bool = False, max_uses: int = 1) -> None:
        self._pool, self._shape, self._fresh, self._max_uses = pool, shape, fresh, max_uses
        self._loan = AsyncExitStack()
        self._sandbox: Box | None = None
        """The sandbox that is kept for the next case."""
        self._until = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        await self.end()

    async def end(self) -> None:
        """Give the sandbox back, if there is one. Whoever runs another program meanwhile must do so first: the slot is
        perhaps the only one."""
        loan, self._loan, self._sandbox = self._loan, AsyncExitStack(), None
        await loan.aclose()

    async def run(self, program: Program, *, patience: str | None = None) -> Run:
        """Run a program, and run it again if its sandbox was paused at the wall limit, or if the program was starved of
        CPU and `patience` names its batch. A starved program then runs alone, unless the other slots have stood idle
        for this batch too often."""
        run = await self._sturdily(program)
        starved = run.outcome is not None and patience is not None and _starved(run.outcome, program.limits.wall)
        if run.outcome is None or not (starved or _paused(run.outcome)):
            return run
        # The clock ran while the program could not, which says nothing about the program.
        patient = replace(program, patience=PATIENCE * program.limits.wall)
        again = await self._sturdily(patient, alone=patience if starved else None)
        if again.outcome is not None and _paused(again.outcome) and again.outcome.paused_seconds > patient.patience:
            raise SandboxLost(f"the sandbox was paused from outside for {again.outcome.paused_seconds:.1f} s")
        return again._replace(started=run.started, rerun=True)

    async def _sturdily(self, program: Program, *, alone: str | None = None) -> Run:
        """Run a program, and try another sandbox if one is lost."""
        losses = deaths = 0
        while True:
            fresh = self._fresh or losses > 0
            try:
                async with self._lent(fresh, alone) as sandbox:
                    started = time.monotonic()
                    outcome = await sandbox.run(program)
                    sandbox.suspect = outcome.abnormal
                if not program.more or outcome.abnormal:
                    await self.end()
                return Run(sandbox, started, outcome)
            except NoSandbox:
                raise
            except SandboxKilled:
                losses, deaths = losses + 1, deaths + fresh
                if deaths == DEATHS:
                    return Run(sandbox, started, None)
            except SandboxLost:
                losses += 1
                if losses >= TRIES:
                    raise

    @asynccontextmanager
    async def _lent(self, fresh: bool, alone: str | None) -> AsyncIterator[Box]:
        """Lend a sandbox for one run: the one that is kept, if it is as it was at birth."""
        if fresh or alone is not None:
            await self.end()
            async with self._pool.lend(self._shape, fresh=fresh, alone=alone) as sandbox:
                yield sandbox
            return
        try:
            kept = self._sandbox
            if kept and (kept.uses >= self._max_uses or time.monotonic() >= self._until or not await kept.reset()):
                await self.end()
            if self._sandbox is None:
                self._sandbox = await self._loan.enter_async_context(self._pool.lend(self._shape))
                self._until = time.monotonic() + TURN_SECONDS
            yield self._sandbox
        except BaseException as error:
            loan, self._loan, self._sandbox = self._loan, AsyncExitStack(), None
            await loan.__aexit__(type(error), error, error.__traceback__)  # which destroys the sandbox
            raise


def _paused(outcome: Outcome) -> bool:
    """Whether the wall limit ended the program after its sandbox had been paused."""
    return outcome.ended is End.WALL and outcome.paused_seconds > 0


def _starved(outcome: Outcome, wall: float) -> bool:
    """Whether the wall limit ended the program after it had waited long for a CPU."""
    waited = outcome.ended is End.WALL and outcome.delay_seconds > STARVED * wall
    return waited and outcome.cpu_seconds < BUSY * wall
