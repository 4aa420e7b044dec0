"""The story of `evalpool run`: read, calibrate, submit, follow, export."""

import platform
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rich.console import Console

from api.connections import store
from api.display import Display
from api.embedded import Servers
from api.exports import write_csv, write_junit, write_parquet
from api.formats import Dataset
from api.handles import BatchHandle
from api.jobs import made_by, submit_stream
from api.page import page
from api.waiting import reasons
from schemas import ceilings
from schemas.errors import SetupError
from schemas.job import JobSpec
from schemas.limits import Limits
from schemas.report import Report
from schemas.result import Result
from schemas.settings import settings
from schemas.terminal import plain
from schemas.version import version

ROOM = 10.0
"""Times the CPU time of its reference solution that a calibrated limit gives a sample."""
SAY_SECONDS = 5.0
STUCK_SECONDS = 20.0
"""Seconds without progress after which the user is told why."""

_notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a note to stderr, since stdout carries results only."""
    _notes.print(plain(text))


@dataclass(frozen=True)
class Run:
    """A file of jobs and what is to be done with it."""

    data: Dataset
    total: int
    """Samples in it."""
    repeat: int = 1
    dedup: bool = True
    cache: bool = False
    force: bool = False
    reference_cpu: dict[str | int | None, float] | None = None
    """CPU seconds of the reference solution of each task, measured here."""

    def jobs(self) -> Iterator[JobSpec]:
        """Its jobs, each sample's repeats a whole round after it."""
        return chain.from_iterable(map(self._fitted, self.data.jobs()) for _ in range(self.repeat))

    def submit(self) -> BatchHandle:
        """Submit them, or take up the batch that the same file and options made before."""
        name = Path(self.data.lines.name).name
        options = [made_by(), f"{self.repeat}", f"{self.dedup}", f"{self.cache}", f"{self.reference_cpu}"]
        return submit_stream(
            self.jobs(),
            self.total * self.repeat,
            name=name,
            idempotency_key=None if self.force else self.data.digest(*options),
            about=self._about(settings().image),
            dedup=self.dedup and self.repeat == 1,
            cache=self.cache,
        )

    def calibrated(self, servers: Servers) -> "Run":
        """The same run, with limits that fit this machine: its reference solutions are measured first."""
        asked = {spec.task_id for spec in self.data.jobs()}
        specs = [
            _with(spec, ROOM * spec.limits.cpu_seconds) for spec in self.data.references() if spec.task_id in asked
        ]
        say(f"calibrating: {len(specs):,} reference solutions")
        key = None if self.force else self.data.digest("references", made_by())
        batch = submit_stream(specs, len(specs), name="references", idempotency_key=key)
        servers.start_worker()
        batch.wait()
        measured: dict[str | int | None, float] = {}
        for result in batch.stream():
            if result.passed:
                cpu = max((case.metrics.cpu_seconds for case in result.cases), default=result.metrics.cpu_seconds)
                measured[result.task_id] = round(cpu, 2)
            else:
                say(f"the reference solution of {result.task_id} did not pass: {result.detail}")
        return replace(self, reference_cpu=measured)

    def _fitted(self, spec: JobSpec) -> JobSpec:
        needed = ROOM * (self.reference_cpu or {}).get(spec.task_id, 0.0)
        return spec if needed <= spec.limits.cpu_seconds else _with(spec, needed)

    def _about(self, image: str) -> dict[str, Any]:
        about: dict[str, Any] = {
            "format": self.data.title,
            "problems": self.data.count(),
            "limits": self.data.limits.model_dump() | {"wall_seconds": self.data.limits.wall},
            "image": image,
            "evalpool": version(),
            "submitted_from": f"{platform.node()}, {platform.system()} {platform.release()}, {platform.machine()}",
            "repeat": self.repeat,
        }
        if self.reference_cpu is not None:
            slowest = max(self.reference_cpu.values(), default=0.0)
            about["calibrated"] = f"{len(self.reference_cpu)} references, {ROOM:g} x; slowest {slowest:g} s"
        return about


def _with(spec: JobSpec, cpu_seconds: float) -> JobSpec:
    """The job with this CPU limit, and with its wall limit scaled alike, as far as the operator allows."""
    limits = spec.limits
    wall = limits.wall_seconds and limits.wall_seconds * cpu_seconds / limits.cpu_seconds
    given = Limits(**limits.model_dump() | {"cpu_seconds": cpu_seconds, "wall_seconds": wall})
    return spec.model_copy(update={"limits": ceilings.lowered(given, settings())})


def load(data: Dataset) -> int:
    """Read all jobs of a file once, so that a bad line is told before anything is started; how many there are."""
    count, tasks, said = 0, set(), time.monotonic()
    for spec in data.jobs():
        count += 1
        tasks.add(hash(spec.task_id))
        if time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            say(f"reading {data.lines.name}: {count:,} jobs so far")
    known = f", {len(tasks):,} tasks)" if tasks != {hash(None)} else ")"
    say(f"format: {data.title} ({count:,} jobs" + known)
    return count


def follow(batch: BatchHandle, servers: Servers, display: Display, *, resumes: bool = True) -> None:
    """Wait until the batch is complete, showing how far it is, as long as there is somebody to run it."""
    if batch.progress().complete:
        if resumes:
            say(f"batch {batch.id} is complete, nothing is left to run; --force runs it again")
        return
    servers.start_worker()
    try:
        with display:
            moved, before = time.monotonic(), 0
            for progress in batch.watch():
                display.update(progress)
                servers.check()
                if progress.running or progress.done != before:
                    moved, before = time.monotonic(), progress.done
                if time.monotonic() - moved > STUCK_SECONDS:
                    _explain(batch, servers)
                    moved = time.monotonic()
    except KeyboardInterrupt:
        how = "the same command again resumes it" if resumes else f"`evalpool report {batch.id}` shows them"
        say(f"\ninterrupted; the finished jobs of batch {batch.id} are kept: {how}")
        raise


def _explain(batch: BatchHandle, servers: Servers) -> None:
    """Say why nothing happens, if there is a reason. A run with a private worker fails: no other worker can come."""
    why = reasons(batch.id)
    if why and servers.private:
        raise SetupError(f"{'; '.join(why)}; --force runs the whole file again, with the images that are here now")
    for reason in why:
        say(reason)


def export(batch: BatchHandle, report: Report, directory: Path, data: Dataset | None = None) -> None:
    """Write every file that somebody may want of a batch: rows, tables, the harness's own result file, the page."""

    def results() -> Iterator[Result]:
        return islice(batch.stream(), report.total)

    def write(name: str, lines: Iterator[Result]) -> None:
        with (directory / name).open("w", encoding="utf-8") as file:
            file.writelines(result.model_dump_json() + "\n" for result in lines)

    write("results.jsonl", results())
    if report.repeats > 1:
        write("repeats.jsonl", islice(batch.stream(), report.total, None))
    write_csv(results(), directory / "results.csv")
    write_junit(results(), directory / "junit.xml", report)
    (directory / "report.html").write_text(page(report, results, store().specs), encoding="utf-8")
    written = ["results.jsonl", "results.csv", "junit.xml", "report.html"]
    try:
        write_parquet(results(), directory / "results.parquet")
        written.append("results.parquet")
    except SetupError as error:
        say(f"no results.parquet: {error}")
    own = data.write(results(), directory, report) if data else None
    say(f"written to {directory}: {', '.join([*written, *([own.name] if own else [])])}")


def summary(report: Report) -> dict[str, object]:
    """The one JSON object that scripts read."""
    return {
        "batch_id": report.batch_id,
        "total": report.total,
        "verdicts": dict(report.verdicts),
        "pass_at_k": {str(k): value for k, value in report.pass_at_k.items()},
        "intervals": {str(k): list(bounds) for k, bounds in report.intervals.items()},
        "tasks": report.tasks,
        "problems": report.problems,
        "excluded": report.excluded,
        "near_limit": report.near_limit,
        "rerun": report.rerun,
        "deduplicated": report.deduplicated,
        "flaky": list(report.flaky),
        "seconds": report.seconds,
        "jobs_per_second": report.jobs_per_second,
    }


def exit_code(report: Report, fail_under: float | None) -> int:
    """0 done, 5 incomplete, 6 below the threshold. Incomplete wins, since its score says too little to fail by."""
    if report.excluded or report.finished < report.total:
        return 5
    return 6 if fail_under is not None and report.pass_at_k.get(1, 0.0) < fail_under else 0


def only(report: Report, ks: Collection[int]) -> Report:
    """The report with the asked k alone, where pass@1 was added for the threshold."""
    asked = {k: value for k, value in report.pass_at_k.items() if k in ks}
    return report.model_copy(
        update={"pass_at_k": asked, "intervals": {k: each for k, each in report.intervals.items() if k in ks}}
    )
