"""The story of one job: a warm sandbox, the program run in it once per case, a verdict."""

import asyncio
import time
from collections.abc import Sequence

from schemas.errors import NoSandbox, SandboxKilled, SandboxLost
from schemas.job import Case, JobSpec
from schemas.lease import Lease
from schemas.result import CaseResult, Metrics, Result
from schemas.rows import moment
from schemas.settings import Settings
from schemas.verdict import Verdict
from worker.pool import Pool
from worker.sandbox.base import Sandbox, Shape
from worker.tools.judge import case_result
from worker.tools.registry import TOOLS

ORDINARY = 4 << 20
"""Bytes of a job, its outputs included, that any sandbox has room for."""
TEXTS, EXCERPT = 4, 256
"""Texts of full length that a job with many cases may keep; and how much is kept of the others."""
LARGE = 1 << 18
"""Bytes of output whose comparison takes so long that the other slots must not wait for it."""
TRIES = 2
"""Sandboxes tried within one attempt: one that breaks at once says little about the next."""
DEATHS = 2
"""Fresh sandboxes that must die under a program, of themselves, until it is the program's own doing."""


async def evaluate(lease: Lease, pool: Pool, settings: Settings) -> Result:
    """Run one job to its result. Raises `SandboxLost` when it was our sandboxes that failed, not the program."""
    spec = lease.spec
    began = time.monotonic()
    runs: list[CaseResult] = []
    room = TEXTS * spec.limits.output_bytes
    for index, case in enumerate(spec.cases or (None,)):
        sandbox, waited, run = await _run(index, case, spec, pool, settings)
        run = _within(run, room)
        room -= len(run.stdout) + len(run.stderr)
        runs.append(run)
        if not index:
            setup_seconds = waited - began
        if run.verdict is not Verdict.PASSED and spec.stop_early:
            break
    return _result(lease, runs, sandbox, setup_seconds, settings.worker_name)


def _within(run: CaseResult, room: int) -> CaseResult:
    """What is kept of many cases must not add up: beyond the job's room, a case keeps the beginnings of its texts."""
    if len(run.stdout) + len(run.stderr) <= room:
        return run
    return run.model_copy(
        update={
            "stdout": run.stdout[:EXCERPT],
            "stderr": run.stderr[:EXCERPT],
            "stdout_truncated": run.stdout_truncated or len(run.stdout) > EXCERPT,
            "stderr_truncated": run.stderr_truncated or len(run.stderr) > EXCERPT,
        }
    )


async def _run(
    index: int, case: Case | None, spec: JobSpec, pool: Pool, settings: Settings
) -> tuple[Sandbox, float, CaseResult]:
    """One case in a sandbox that nothing else is in, and when it got there."""
    program = TOOLS[spec.tool].program(spec, case)
    losses = deaths = 0
    while True:
        fresh = spec.isolation == "fresh" or losses > 0
        try:
            async with pool.lend(shape_of(spec, settings), fresh=fresh) as sandbox:
                started = time.monotonic()
                outcome = await sandbox.run(program)
                sandbox.suspect = outcome.abnormal
            if len(outcome.stdout) < LARGE:
                return sandbox, started, case_result(index, outcome, spec, case)
            return sandbox, started, await asyncio.to_thread(case_result, index, outcome, spec, case)
        except NoSandbox:
            raise
        except SandboxKilled:
            losses, deaths = losses + 1, deaths + fresh
            if deaths == DEATHS:
                detail = f"{DEATHS} fresh sandboxes died of it, one after the other"
                return sandbox, started, CaseResult(index=index, verdict=Verdict.RUNTIME_ERROR, detail=detail)
        except SandboxLost:
            losses += 1
            if losses == TRIES:
                raise


def shape_of(spec: JobSpec, settings: Settings) -> Shape:
    """The sandbox a job needs."""
    limits = spec.limits
    stdin = max((len(case.stdin) for case in spec.cases), default=len(spec.stdin))
    held = len(spec.code) + stdin + sum(map(len, spec.files.values())) + len(spec.check or "") + 2 * limits.output_bytes
    extra = 0 if held <= ORDINARY else 1 << (2 * held - 1 >> 20).bit_length()  # in steps, so that shapes are few
    return Shape(spec.image or settings.image, limits.memory_mib, limits.processes, limits.disk_mib, extra)


def _result(lease: Lease, runs: Sequence[CaseResult], sandbox: Sandbox, setup: float, worker: str) -> Result:
    """All runs as one: the first that failed decides, else the last."""
    decisive = next((run for run in runs if run.verdict is not Verdict.PASSED), runs[-1])
    detail = decisive.detail
    if lease.spec.cases:
        passed = sum(run.verdict is Verdict.PASSED for run in runs)
        detail = f"{passed} of {len(lease.spec.cases)} cases passed"
        if decisive.verdict is not Verdict.PASSED:
            detail += f"; case {decisive.index}: {decisive.detail}"
    return finished(
        lease,
        decisive.verdict,
        detail,
        worker,
        **decisive.model_dump(
            include={"exit_code", "signal", "stdout", "stderr", "stdout_truncated", "stderr_truncated"}
        ),
        cases=tuple(runs) if lease.spec.cases else (),
        metrics=Metrics(
            wall_seconds=sum(run.metrics.wall_seconds for run in runs),
            cpu_seconds=sum(run.metrics.cpu_seconds for run in runs),
            peak_memory_bytes=max(run.metrics.peak_memory_bytes for run in runs),
            oom_killed=any(run.metrics.oom_killed for run in runs),
            processes_peak=max(run.metrics.processes_peak for run in runs),
            output_bytes=sum(run.metrics.output_bytes for run in runs),
            queue_seconds=max(0.0, lease.started_at - lease.created_at),
            setup_seconds=setup,
            sandbox_uses=sandbox.uses,
        ),
        sandbox_id=sandbox.id,
        image_digest=sandbox.image_digest,
    )


def finished(lease: Lease, verdict: Verdict, detail: str, worker: str, **more: object) -> Result:
    """The result of a job, as of now."""
    fields: dict[str, object] = {
        "job_id": lease.job_id,
        "batch_id": lease.batch_id,
        "task_id": lease.spec.task_id,
        "sample_id": lease.spec.sample_id,
        "labels": lease.spec.labels,
        "verdict": verdict,
        "detail": detail,
        "attempt": lease.attempt,
        "worker": worker,
        "created_at": moment(lease.created_at),
        "started_at": moment(lease.started_at),
        "finished_at": moment(lease.now),
    }
    return Result.model_validate(fields | more)
