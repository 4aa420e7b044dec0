"""The story of one job: the program is run once per case, in a sandbox from the pool, and gets a verdict."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple

from evalpool.schemas import ceilings
from evalpool.schemas.errors import CheckerFailed, InvalidJob, SetupError
from evalpool.schemas.images import name_of, wanted
from evalpool.schemas.job import Case, JobSpec
from evalpool.schemas.lease import Lease
from evalpool.schemas.limits import Limits
from evalpool.schemas.result import CaseResult, Metrics, Result
from evalpool.schemas.rows import moment
from evalpool.schemas.settings import Settings
from evalpool.schemas.verdict import Verdict
from evalpool.worker.artifacts import Artifacts
from evalpool.worker.imports import Imports
from evalpool.worker.imports import wanted as slow
from evalpool.worker.judge.comparators import VERSION
from evalpool.worker.judge.judge import case_result, compile_error, is_small, one_line, syntax_error
from evalpool.worker.pool import Pool
from evalpool.worker.sandbox.base import Box, End, Outcome, Program, Shape
from evalpool.worker.tools.languages import LANGUAGES, lacks, unpacked
from evalpool.worker.tools.registry import TOOLS
from evalpool.worker.turn import DEATHS, Run, Turn

ORDINARY = 4 << 20
"""Bytes of a job, including its outputs, for which every sandbox has room."""
TEXTS, EXCERPT = 4, 256
"""A job with many cases keeps this many outputs of full length, and this many characters of each further output."""
CHECKER = Limits(cpu_seconds=10, output_bytes=1 << 16)
"""The limits of a checker."""


class Compiled(NamedTuple):
    """What the compiler made of a program; nothing if the program is not compiled."""

    binary: bytes | None = None
    error: CaseResult | None = None


class Runs(NamedTuple):
    """The results of all cases of a job."""

    results: Sequence[CaseResult]
    started: float
    """When the first case began, by the monotonic clock."""
    sandbox: Box | None = None
    """The sandbox of the last case; `None` if the program has an error for which it cannot be run at all."""


class Opinion(NamedTuple):
    """What a checker thinks of an output."""

    accepted: bool | None
    """`None` if the checker failed."""
    words: str
    """What the checker wrote, with a colon before it; or nothing."""


async def evaluate(
    lease: Lease, pool: Pool, artifacts: Artifacts, settings: Settings, imports: Imports | None = None
) -> Result:
    """Run one job to its result. Raises `SandboxLost` if our sandboxes have failed, and not the program."""
    job = Evaluation(lease, lease.image or wanted(lease.spec, settings), pool, artifacts, settings, imports)
    try:
        ceilings.check(lease.spec.limits, settings)
    except InvalidJob as error:  # the submitter may have other settings; a second attempt would not help
        return finished(lease, Verdict.SANDBOX_ERROR, str(error), settings.worker_name)
    began = time.monotonic()
    await job.check_image()
    compiled = await job.compile()
    if compiled.error is not None:
        runs = Runs([compiled.error], time.monotonic())
    else:
        runs = await job.run_cases(compiled.binary)
    return _result(lease, runs, runs.started - began, settings.worker_name)


@dataclass(frozen=True)
class Evaluation:
    """One job, and what its evaluation uses."""

    lease: Lease
    image: str
    pool: Pool
    artifacts: Artifacts
    settings: Settings
    imports: Imports | None = None
    """What the recent jobs imported; `None` if no sandbox is kept for that."""

    @property
    def spec(self) -> JobSpec:
        """The job as it was submitted."""
        return self.lease.spec

    async def check_image(self) -> None:
        """Raise `SetupError` if the image lacks what the job's language needs, as this is not the program's fault. Each
        image is asked once, in a sandbox without a program."""
        needed = LANGUAGES[self.spec.runs].needs
        if needed == "bash" or (needed == "python3" and self.image == self.settings.image):
            return  # where there is no bash, `sh` will do
        program = Program(code=b"", main="main", argv=("sh", "-c", f"command -v {needed}"))

        async def ask() -> Outcome:
            async with Turn(self.pool, _shape(self.image, program.limits, 0)) as turn:
                run = await turn.run(program)
            return run.outcome or Outcome.killed_for_memory(0)

        found = await self.artifacts.get(f"{self.image} {needed}", ask)
        if found.exit_code != 0:
            raise SetupError(
                f"image: {name_of(self.image)} {lacks(self.spec)}; "
                "`evalpool images build code` builds an image that has it"
            )

    async def compile(self) -> Compiled:
        """Compile the program, unless the same source was compiled for another job."""
        program = TOOLS[self.spec.tool].compiler(self.spec)
        if program is None:
            return Compiled()
        held = len(program.code) + sum(map(len, program.files.values())) + program.limits.output_bytes
        shape = _shape(self.image, program.limits, held)

        async def make() -> Outcome:
            run = await self._run(program, shape, patience=self.lease.batch_id)
            return run.outcome or Outcome.killed_for_memory(0)

        made = await self.artifacts.get(await asyncio.to_thread(_key, self.image, program), make)
        return Compiled(made.stdout, await asyncio.to_thread(compile_error, made, self.spec.limits))

    async def run_cases(self, binary: bytes | None) -> Runs:
        """Run the program once per case, or once if there are none, until a case fails if the job is to stop early."""
        spec, shape = self.spec, shape_of(self.spec, self.image, binary)
        if self.imports is not None and (modules := self.imports.choose(self.image, slow(spec, self.settings))):
            shape = replace(shape, preload=modules)
        results: list[CaseResult] = []
        started, sandbox = 0.0, None
        patience, unchecked, room = True, True, TEXTS * spec.limits.output_bytes
        async with self._turn(shape) as turn:
            programs = TOOLS[spec.tool].programs(spec, binary)
            for index, (case, program) in enumerate(zip(spec.cases or (None,), programs, strict=True)):
                run = await turn.run(program, patience=self.lease.batch_id if patience else None)
                sandbox, started = run.sandbox, started or run.started
                if case is not None and case.comparator == "checker":
                    await turn.end()  # the checker needs a sandbox, too
                result = _within(await self._judge(index, case, run), room)
                patience = patience and not result.metrics.rerun  # once for a job, as the other slots stand idle for it
                room -= len(result.stdout) + len(result.stderr)
                results.append(result)
                # Only after a failure, and once for a job: programs without errors do not pay for it.
                if unchecked and result.verdict is Verdict.RUNTIME_ERROR and result.exit_code:
                    unchecked = False
                    await turn.end()
                    if (refused := await self._syntax_error(shape)) is not None:
                        return Runs([refused], started)
                if result.verdict is not Verdict.PASSED and spec.stop_early:
                    break
        return Runs(results, started, sandbox)

    def _turn(self, shape: Shape) -> Turn:
        return Turn(self.pool, shape, fresh=self.spec.isolation == "fresh", max_uses=self.settings.max_uses)

    async def _run(self, program: Program, shape: Shape, *, patience: str | None) -> Run:
        """Run one program that is not the job's own."""
        async with self._turn(shape) as turn:
            return await turn.run(program, patience=patience)

    async def _judge(self, index: int, case: Case | None, run: Run) -> CaseResult:
        """Return the result of one case, for which the job's checker is asked if it has one."""
        if run.outcome is None:
            detail = f"{DEATHS} fresh sandboxes ended by themselves, one after the other, while they ran the program"
            return CaseResult(index=index, verdict=Verdict.RUNTIME_ERROR, detail=detail)
        if is_small(run.outcome, case):
            result = case_result(index, run.outcome, self.spec, case)
        else:  # in a thread, since the other slots must not wait for it
            result = await asyncio.to_thread(case_result, index, run.outcome, self.spec, case)
        if run.rerun:
            result = result.model_copy(update={"metrics": result.metrics.model_copy(update={"rerun": True})})
        if result.verdict is Verdict.PASSED and case is not None and case.comparator == "checker":
            opinion = await self._check(case, run.outcome)
            if not opinion.accepted:
                detail = f"the checker rejected the output{opinion.words}"
                result = result.model_copy(update={"verdict": Verdict.WRONG_ANSWER, "detail": detail})
        return result

    async def _syntax_error(self, shape: Shape) -> CaseResult | None:
        """Return the syntax error of a program that has failed, if it has one and its language is not compiled. The
        interpreter is given the text that was submitted, as the program may have changed its file."""
        program = TOOLS[self.spec.tool].syntax(self.spec)
        if program is None:
            return None
        run = await self._run(program, shape, patience=None)
        return None if run.outcome is None else syntax_error(run.outcome, self.spec.limits)

    async def _check(self, case: Case, outcome: Outcome) -> Opinion:
        """Return the decision of the job's checker, which runs in a sandbox without the program. Raises `CheckerFailed`
        if the checker cannot even judge the expected output."""
        files = {"input": case.stdin.encode(), "output": outcome.stdout, "answer": case.expected.encode()}
        opinion = await self._ask_checker(files)
        if opinion.accepted is not None:
            return opinion
        # A program must not escape its score with an output that its checker cannot handle. If the checker can judge
        # the expected output, the program's output is wrong.
        able = await self._ask_checker(files | {"output": files["answer"]})
        if able.accepted is None:
            raise CheckerFailed(f"checker_failed{opinion.words}")
        return Opinion(False, f": the checker failed on this output, but not on the expected one{opinion.words}")

    async def _ask_checker(self, files: dict[str, bytes]) -> Opinion:
        code = (self.spec.checker or "").encode()
        program = Program(code=code, main="main.py", args=tuple(files), files=files, limits=CHECKER)
        held = len(program.code) + 2 * sum(map(len, files.values())) + 2 * CHECKER.output_bytes
        run = await self._run(program, _shape(self.settings.image, CHECKER, held), patience=None)
        outcome = run.outcome
        if outcome is None:
            return Opinion(None, "")
        words = one_line(outcome.stderr or outcome.stdout)
        decided = outcome.ended is End.ITSELF and outcome.exit_code in (0, 1) and not outcome.note
        return Opinion(outcome.exit_code == 0 if decided else None, f": {words}" if words else "")


def _within(result: CaseResult, room: int) -> CaseResult:
    """Return a result whose outputs are cut to an excerpt if they exceed this many characters, as the outputs of many
    cases must not add up."""
    if len(result.stdout) + len(result.stderr) <= room:
        return result
    return result.model_copy(
        update={
            "stdout": result.stdout[:EXCERPT],
            "stderr": result.stderr[:EXCERPT],
            "stdout_truncated": result.stdout_truncated or len(result.stdout) > EXCERPT,
            "stderr_truncated": result.stderr_truncated or len(result.stderr) > EXCERPT,
        }
    )


def _key(image: str, program: Program) -> str:
    """Return a hash of everything that the compiler's output depends on. Large texts are hashed without a copy."""
    files = sorted(program.files.items())
    sizes = [len(program.code), *((name, len(content)) for name, content in files)]
    key = sha256(repr((image, program.main, program.argv, sizes)).encode())
    for content in (program.code, *(content for _, content in files)):
        key.update(content)
    return key.hexdigest()


def shape_of(spec: JobSpec, image: str, binary: bytes | None = None) -> Shape:
    """Return the shape of the sandbox that a job needs for all its cases; a binary may be larger than its source."""
    stdin = max((len(case.stdin) for case in spec.cases), default=len(spec.stdin))
    held = (
        len(spec.code if binary is None else binary)
        + stdin
        + sum(map(len, spec.files.values()))
        + len(spec.check or "")
    )
    shape = _shape(image, spec.limits, held + 2 * spec.limits.output_bytes)
    large = 0 if binary is None else unpacked(binary) >> 20  # in addition to the job's own files, and in steps, too
    return replace(shape, disk_mib=shape.disk_mib + (1 << large.bit_length())) if large > 8 else shape


def _shape(image: str, limits: Limits, held: int) -> Shape:
    extra = 0 if held <= ORDINARY else 1 << (2 * held - 1 >> 20).bit_length()  # in steps, so that shapes are few
    return Shape(image, limits.memory_mib, limits.processes, limits.disk_mib, extra)


def _result(lease: Lease, runs: Runs, setup_seconds: float, worker: str) -> Result:
    """Return the result of a job. The first case that failed decides, or else the last one."""
    results, sandbox = runs.results, runs.sandbox
    decisive = next((result for result in results if result.verdict is not Verdict.PASSED), results[-1])
    cases = tuple(results) if lease.spec.cases and sandbox is not None else ()
    return finished(
        lease,
        decisive.verdict,
        _detail(len(lease.spec.cases), cases, decisive),
        worker,
        **decisive.model_dump(
            include={"exit_code", "signal", "stdout", "stderr", "stdout_truncated", "stderr_truncated"}
        ),
        cases=cases,
        metrics=_total([result.metrics for result in results]).model_copy(
            update={
                "queue_seconds": max(0.0, lease.started_at - lease.created_at),
                "setup_seconds": setup_seconds,
                "sandbox_uses": sandbox.uses if sandbox else 0,
            }
        ),
        sandbox_id=sandbox and sandbox.id,
        image_digest=sandbox and sandbox.image_digest,
        comparator=", ".join(sorted({f"{case.comparator}/{VERSION}" for case in lease.spec.cases})) or None,
    )


def _detail(count: int, cases: Sequence[CaseResult], decisive: CaseResult) -> str:
    """Return the sentence that explains the verdict; for a job with cases, it begins with how many have passed."""
    if not cases:
        return decisive.detail
    passed = sum(case.verdict is Verdict.PASSED for case in cases)
    why = "" if decisive.verdict is Verdict.PASSED else f"; case {decisive.index}: {decisive.detail}"
    return f"{passed} of {count} cases passed{why}"


def _total(runs: Sequence[Metrics]) -> Metrics:
    """Return the metrics of all cases as one."""
    return Metrics(
        wall_seconds=sum(run.wall_seconds for run in runs),
        cpu_seconds=sum(run.cpu_seconds for run in runs),
        peak_memory_bytes=max(run.peak_memory_bytes for run in runs),
        oom_killed=any(run.oom_killed for run in runs),
        processes_peak=max(run.processes_peak for run in runs),
        output_bytes=sum(run.output_bytes for run in runs),
        limit_share=max(run.limit_share for run in runs),
        rerun=any(run.rerun for run in runs),
    )


def finished(lease: Lease, verdict: Verdict, detail: str, worker: str, **more: object) -> Result:
    """Return the result of a job that has ended now."""
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
