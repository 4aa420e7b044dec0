"""The story of one job: a warm sandbox, the program run in it once per case, a verdict."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from schemas import ceilings
from schemas.errors import CheckerFailed, InvalidJob, NoSandbox, SandboxKilled, SandboxLost, SetupError
from schemas.images import name_of, wanted
from schemas.job import Case, JobSpec
from schemas.lease import Lease
from schemas.limits import Limits
from schemas.result import CaseResult, Metrics, Result
from schemas.rows import moment
from schemas.settings import Settings
from schemas.verdict import Verdict
from worker.artifacts import Artifacts
from worker.pool import Pool
from worker.sandbox.base import Outcome, Program, Sandbox, Shape
from worker.tools.comparators import VERSION
from worker.tools.judge import case_result, compiled, text
from worker.tools.languages import LANGUAGES
from worker.tools.registry import TOOLS

ORDINARY = 4 << 20
"""Bytes of a job, its outputs included, that any sandbox has room for."""
TEXTS, EXCERPT = 4, 256
"""Texts of full length that a job with many cases may keep; and how much is kept of the others."""
LARGE = 1 << 18
"""Bytes of output whose comparison takes so long that the other slots must not wait for it."""
STARVED = 0.1
"""Of the wall limit: a program that had no CPU for longer, though it wanted one, is run again alone."""
PATIENCE = 4
"""Times the wall limit that a second run may wait for a CPU or be paused: we cannot stop other programs."""
BUSY = 0.8
"""Of the wall time: a program that had the CPU for so long was kept from it by its own processes alone."""
CHECKER = Limits(cpu_seconds=10, output_bytes=1 << 16)
"""What a checker may use."""
TRIES = 2
"""Sandboxes tried within one attempt: one that breaks at once says little about the next."""
DEATHS = 2
"""Fresh sandboxes that must die under a program, of themselves, until it is the program's own doing."""


async def evaluate(lease: Lease, pool: Pool, artifacts: Artifacts, settings: Settings) -> Result:
    """Run one job to its result. Raises `SandboxLost` when it was our sandboxes that failed, not the program."""
    spec, image = lease.spec, lease.image or wanted(lease.spec, settings)
    try:
        ceilings.check(spec.limits, settings)
    except InvalidJob as error:  # the submitter may have other settings; a second attempt would not help
        return finished(lease, Verdict.SANDBOX_ERROR, str(error), settings.worker_name)
    began = time.monotonic()
    await _equipped(spec, image, pool, artifacts, settings)
    made = await _compiled(spec, image, pool, artifacts)
    if made is not None and (refused := compiled(made)) is not None:
        return _result(lease, [refused], None, time.monotonic() - began, settings.worker_name)
    binary = None if made is None else made.stdout
    shape, patience = shape_of(spec, image, binary), True
    runs: list[CaseResult] = []
    room = TEXTS * spec.limits.output_bytes
    for index, case in enumerate(spec.cases or (None,)):
        program = TOOLS[spec.tool].program(spec, case, binary)
        sandbox, waited, run = await _run(index, case, spec, program, shape, pool, settings, patience=patience)
        patience = patience and not run.metrics.rerun  # once for a job: it stops the whole worker
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


async def _equipped(spec: JobSpec, image: str, pool: Pool, artifacts: Artifacts, settings: Settings) -> None:
    """`SetupError` if the image lacks what the job's language needs: no program must pay for that. Asked once of an
    image, where no program is."""
    needed = LANGUAGES[spec.runs].needs
    if needed == "bash" or (needed == "python3" and image == settings.image):
        return  # where there is no bash, `sh` will do
    program = Program(code=b"", main="main", argv=("sh", "-c", f"command -v {needed}"))

    async def ask() -> Outcome:
        _, _, outcome, _ = await _fairly(program, _shape(image, program.limits, 0), pool, fresh=False, patience=False)
        return outcome or Outcome.killed_for_memory(0)

    found = await artifacts.get(f"{image} {needed}", ask)
    if found.exit_code != 0:
        raise SetupError(
            f"image: {name_of(image)} has no {needed}, which {spec.runs} needs; "
            "`evalpool images build code` builds an image that has it"
        )


async def _compiled(spec: JobSpec, image: str, pool: Pool, artifacts: Artifacts) -> Outcome | None:
    """What the job's compiler made of it, now or for another job; nothing where there is nothing to compile."""
    program = TOOLS[spec.tool].compiler(spec)
    if program is None:
        return None
    held = len(program.code) + sum(map(len, program.files.values())) + program.limits.output_bytes
    shape = _shape(image, program.limits, held)

    async def make() -> Outcome:
        _, _, outcome, _ = await _fairly(program, shape, pool, fresh=spec.isolation == "fresh", patience=True)
        return outcome or Outcome.killed_for_memory(0)

    parts = (image, program.main, program.argv, program.code, sorted(program.files.items()))
    return await artifacts.get(sha256(repr(parts).encode()).hexdigest(), make)


async def _run(
    index: int,
    case: Case | None,
    spec: JobSpec,
    program: Program,
    shape: Shape,
    pool: Pool,
    settings: Settings,
    *,
    patience: bool,
) -> tuple[Sandbox, float, CaseResult]:
    """One case in a sandbox that nothing else is in, and when it got there. With patience, a starved one again."""
    fresh = spec.isolation == "fresh"
    sandbox, started, outcome, rerun = await _fairly(program, shape, pool, fresh=fresh, patience=patience)
    if outcome is None:
        detail = f"{DEATHS} fresh sandboxes died of it, one after the other"
        return sandbox, started, CaseResult(index=index, verdict=Verdict.RUNTIME_ERROR, detail=detail)
    if len(outcome.stdout) < LARGE:
        run = case_result(index, outcome, spec, case)
    else:
        run = await asyncio.to_thread(case_result, index, outcome, spec, case)
    if rerun:
        run = run.model_copy(update={"metrics": run.metrics.model_copy(update={"rerun": True})})
    if run.verdict is Verdict.PASSED and case is not None and case.comparator == "checker":
        accepted, words = await _checked(case, spec, outcome, pool, settings)
        if not accepted:
            run = run.model_copy(update={"verdict": Verdict.WRONG_ANSWER, "detail": f"its checker says no{words}"})
    return sandbox, started, run


async def _fairly(
    program: Program, shape: Shape, pool: Pool, *, fresh: bool, patience: bool
) -> tuple[Sandbox, float, Outcome | None, bool]:
    """What it did, in which sandbox and since when, and whether it was run again. A program is run again if its sandbox
    was paused at the wall limit, or, with patience, if it was starved of CPU; in that case it runs alone."""
    sandbox, started, outcome = await _outcome(program, shape, pool, fresh=fresh)
    starved = outcome is not None and patience and _starved(outcome, program.limits.wall)
    rerun = starved or (outcome is not None and _paused(outcome))
    if rerun:  # the clock ran while the program could not: that says nothing about it
        patient = replace(program, patience=PATIENCE * program.limits.wall)
        sandbox, _, outcome = await _outcome(patient, shape, pool, fresh=fresh, alone=starved)
        if outcome is not None and _paused(outcome) and outcome.paused_seconds > patient.patience:
            raise SandboxLost(f"the sandbox was paused from outside for {outcome.paused_seconds:.1f} s")
    return sandbox, started, outcome, rerun


def _paused(outcome: Outcome) -> bool:
    """Whether the wall limit ended it after its sandbox had been paused."""
    return outcome.ended == "wall" and outcome.paused_seconds > 0


def _starved(outcome: Outcome, wall: float) -> bool:
    wanted = outcome.ended == "wall" and outcome.delay_seconds > STARVED * wall
    return wanted and outcome.cpu_seconds < BUSY * wall


async def _outcome(
    program: Program, shape: Shape, pool: Pool, *, fresh: bool, alone: bool = False
) -> tuple[Sandbox, float, Outcome | None]:
    """What the program did, and where and when; `None`: it was too much for fresh sandboxes, again and again."""
    losses = deaths = 0
    while True:
        fresh = fresh or losses > 0
        try:
            async with pool.lend(shape, fresh=fresh, alone=alone) as sandbox:
                started = time.monotonic()
                outcome = await sandbox.run(program)
                sandbox.suspect = outcome.abnormal
            return sandbox, started, outcome
        except NoSandbox:
            raise
        except SandboxKilled:
            losses, deaths = losses + 1, deaths + fresh
            if deaths == DEATHS:
                return sandbox, started, None
        except SandboxLost:
            losses += 1
            if losses == TRIES:
                raise


async def _checked(case: Case, spec: JobSpec, outcome: Outcome, pool: Pool, settings: Settings) -> tuple[bool, str]:
    """The word of the job's own checker, which runs where the program never was."""
    files = {"input": case.stdin.encode(), "output": outcome.stdout, "answer": case.expected.encode()}
    accepted, words = await _asked(spec.checker or "", files, pool, settings)
    if accepted is None:
        # A program must not get out of the score by an output that its checker cannot bear: if it can judge the
        # expected output, it is the program's that is wrong.
        able, _ = await _asked(spec.checker or "", files | {"output": files["answer"]}, pool, settings)
        if able is None:
            raise CheckerFailed(f"checker_failed{words}")
        words = f": it failed on this output, not on the expected one{words}"
    return bool(accepted), words


async def _asked(code: str, files: dict[str, bytes], pool: Pool, settings: Settings) -> tuple[bool | None, str]:
    """Whether a checker accepts; nothing if it neither accepts nor rejects. And its words."""
    program = Program(code=code.encode(), main="main.py", args=tuple(files), files=files, limits=CHECKER)
    held = len(program.code) + 2 * sum(map(len, files.values())) + 2 * CHECKER.output_bytes
    shape = _shape(settings.image, CHECKER, held)
    _, _, said, _ = await _fairly(program, shape, pool, fresh=False, patience=False)
    if said is None:
        return None, ""
    words = text(said.stderr or said.stdout).strip()[:300]
    decided = said.ended == "itself" and said.exit_code in (0, 1) and not said.said
    return (said.exit_code == 0 if decided else None), f": {words}" if words else ""


def shape_of(spec: JobSpec, image: str, binary: bytes | None = None) -> Shape:
    """The sandbox a job needs for all its cases; what was compiled may be larger than its text."""
    stdin = max((len(case.stdin) for case in spec.cases), default=len(spec.stdin))
    held = (
        len(spec.code if binary is None else binary)
        + stdin
        + sum(map(len, spec.files.values()))
        + len(spec.check or "")
    )
    return _shape(image, spec.limits, held + 2 * spec.limits.output_bytes)


def _shape(image: str, limits: Limits, held: int) -> Shape:
    extra = 0 if held <= ORDINARY else 1 << (2 * held - 1 >> 20).bit_length()  # in steps, so that shapes are few
    return Shape(image, limits.memory_mib, limits.processes, limits.disk_mib, extra)


def _result(lease: Lease, runs: Sequence[CaseResult], sandbox: Sandbox | None, setup: float, worker: str) -> Result:
    """All runs as one: the first that failed decides, else the last. Without a sandbox it was only compiled."""
    decisive = next((run for run in runs if run.verdict is not Verdict.PASSED), runs[-1])
    detail = decisive.detail
    if lease.spec.cases and sandbox is not None:
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
        cases=tuple(runs) if lease.spec.cases and sandbox is not None else (),
        metrics=Metrics(
            wall_seconds=sum(run.metrics.wall_seconds for run in runs),
            cpu_seconds=sum(run.metrics.cpu_seconds for run in runs),
            peak_memory_bytes=max(run.metrics.peak_memory_bytes for run in runs),
            oom_killed=any(run.metrics.oom_killed for run in runs),
            processes_peak=max(run.metrics.processes_peak for run in runs),
            output_bytes=sum(run.metrics.output_bytes for run in runs),
            queue_seconds=max(0.0, lease.started_at - lease.created_at),
            setup_seconds=setup,
            sandbox_uses=sandbox.uses if sandbox else 0,
            limit_share=max(run.metrics.limit_share for run in runs),
            rerun=any(run.metrics.rerun for run in runs),
        ),
        sandbox_id=sandbox and sandbox.id,
        image_digest=sandbox and sandbox.image_digest,
        comparator=", ".join(sorted({f"{case.comparator}/{VERSION}" for case in lease.spec.cases})) or None,
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
