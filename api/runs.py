"""The story of `evalpool run`: load a file, calibrate, submit, follow, export."""

import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rich.console import Console

from evalpool.api import machine
from evalpool.api.connections import fleet, store
from evalpool.api.display import Display
from evalpool.api.embedded import Servers, embedded
from evalpool.api.formats import Dataset
from evalpool.api.handles import BatchHandle
from evalpool.api.jobs import made_by, submit_stream
from evalpool.api.reports.exports import write_csv, write_junit, write_parquet
from evalpool.api.reports.page import page
from evalpool.api.waiting import reasons
from evalpool.schemas import ceilings
from evalpool.schemas.errors import InvalidJob, SetupError
from evalpool.schemas.job import JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result
from evalpool.schemas.settings import Settings, settings
from evalpool.schemas.terminal import plain
from evalpool.schemas.verdict import Verdict
from evalpool.schemas.version import version

ROOM = 10.0
"""A calibrated CPU limit is at least this many times the CPU time of the reference solution."""
SAY_SECONDS = 5.0
"""Seconds between two notes while a file is read."""
STUCK_SECONDS = 20.0
"""Seconds without progress after which a note says why."""

_notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a note to stderr, since stdout carries results only."""
    _notes.print(plain(text))


@dataclass(frozen=True)
class Run:
    """A file of jobs, and how it is to be run."""

    data: Dataset
    total: int
    """The number of samples in the file."""
    repeat: int = 1
    dedup: bool = True
    cache: bool = False
    force: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)
    """Fields for jobs that do not name them."""
    reference_cpu: dict[str | int | None, float] | None = None
    """Task → CPU seconds of its reference solution, as measured on this machine."""

    def jobs(self) -> Iterator[JobSpec]:
        """Yield the jobs, with repeats as whole rounds over all samples."""
        return chain.from_iterable(map(self._fitted, self.data.jobs()) for _ in range(self.repeat))

    def submit(self) -> BatchHandle:
        """Submit the jobs, or return the batch of an earlier run with the same file and options."""
        name = Path(self.data.lines.name).name
        options = [made_by(), f"{self.repeat}", f"{self.dedup}", f"{self.cache}", f"{self.reference_cpu}"]
        options += [f"{dict(self.given)}"] if self.given else []
        return submit_stream(
            self.jobs(),
            self.total * self.repeat,
            name=name,
            idempotency_key=None if self.force else self.data.digest(*options),
            about=self._about(self.given.get("image") or settings().image),
            dedup=self.dedup and self.repeat == 1,
            cache=self.cache,
        )

    def calibrated(self, servers: Servers) -> "Run":
        """Measure the reference solutions, and return the run with limits that fit this machine."""
        asked = {spec.task_id for spec in self.data.jobs()}
        specs = [
            _with(self._chosen(spec), ROOM * spec.limits.cpu_seconds)
            for spec in self.data.references()
            if spec.task_id in asked
        ]
        say(f"calibrating with {len(specs):,} reference solutions")
        key = None if self.force else self.data.digest("references", made_by(), *map(str, self.given.items()))
        batch = submit_stream(specs, len(specs), name="references", idempotency_key=key)
        _watch(batch, servers, resumes=not self.force)
        measured: dict[str | int | None, float] = {}
        for result in batch.stream():
            if result.passed:
                cpu = max((case.metrics.cpu_seconds for case in result.cases), default=result.metrics.cpu_seconds)
                measured[result.task_id] = round(cpu, 2)
            else:
                say(f"the reference solution of {result.task_id} did not pass: {result.detail}")
        return replace(self, reference_cpu=measured)

    def _chosen(self, spec: JobSpec) -> JobSpec:
        """Return the job with the given fields that it does not name itself. Labels are added to its own."""
        named = {name for name in spec.model_fields_set if getattr(spec, name) is not None}
        own = {name: value for name, value in self.given.items() if name not in named}
        if "labels" in self.given:
            own["labels"] = {**self.given["labels"], **(spec.labels or {})}
        return spec.model_copy(update=own) if own else spec

    def _fitted(self, spec: JobSpec) -> JobSpec:
        spec = self._chosen(spec)
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
    """Return the job with this CPU limit, and its wall limit scaled alike, as far as the operator allows."""
    limits = spec.limits
    wall = limits.wall_seconds and limits.wall_seconds * cpu_seconds / limits.cpu_seconds
    given = Limits(**limits.model_dump() | {"cpu_seconds": cpu_seconds, "wall_seconds": wall})
    return spec.model_copy(update={"limits": ceilings.lowered(given, settings())})


def load(data: Dataset) -> int:
    """Read all jobs of a file once, so that a bad line is found before anything is started. Returns their number."""
    count, tasks, noted = 0, set(), time.monotonic()
    for spec in data.jobs():
        count += 1
        tasks.add(hash(spec.task_id))
        if time.monotonic() - noted > SAY_SECONDS:
            noted = time.monotonic()
            say(f"reading {data.lines.name}: {count:,} jobs so far")
    known = f", {len(tasks):,} tasks)" if tasks != {hash(None)} else ")"
    say(f"format: {data.title} ({count:,} {'job' if count == 1 else 'jobs'}" + known)
    return count


def evaluate(
    submit: Callable[[Servers], BatchHandle],
    now: Settings,
    *,
    slots: int | None = None,
    image: str | None = None,
    resumes: bool = True,
) -> BatchHandle:
    """Submit a batch and wait until it is complete, with a private worker unless a Redis is configured in the settings.
    `resumes` says whether the same submission made again goes on with the same batch."""
    with workers(now, slots, image) as servers:
        batch = submit(servers)
        follow(batch, servers, resumes=resumes)
    return batch


@contextmanager
def workers(now: Settings, slots: int | None = None, image: str | None = None) -> Iterator[Servers]:
    """Provide what runs jobs: the configured workers, or a private Redis and what is needed to start a private worker
    with so many slots, which keeps sandboxes of this image warm."""
    with embedded(now, slots, image) as servers:
        if servers.private:
            machine.report()
            _check(image)
        elif slots is not None:
            say("--slots has no effect, because the workers behind EVALPOOL_REDIS_URL have slots of their own")
        yield servers


def _check(image: str | None) -> None:
    """Raise `InvalidJob` if the private worker would not find this image. If Docker does not answer, nothing is known
    about images, and the worker will say so."""
    here = fleet()
    if image is not None and here.members and not here.has(image):
        raise InvalidJob(
            f"--image: there is no image {image!r} on this machine; `docker images` lists those that are here, "
            f"`docker pull {image}` fetches it from a registry, and `evalpool images build` builds evalpool's own"
        )


def follow(batch: BatchHandle, servers: Servers, *, resumes: bool = True) -> None:
    """Wait until the batch is complete, with a display of its progress. Raises `SetupError` if a private worker dies or
    cannot run the jobs."""
    progress = batch.progress()
    if not progress.complete:
        _watch(batch, servers, resumes=resumes)
    elif resumes:
        failed = progress.verdicts.get(Verdict.SANDBOX_ERROR, 0)
        but = f", but {failed:,} of its {progress.total:,} jobs could not be run ({Verdict.SANDBOX_ERROR})"
        say(f"batch {batch.id} is complete{but if failed else ''}; nothing was run now, --force runs the file again")


def _watch(batch: BatchHandle, servers: Servers, *, resumes: bool) -> None:
    servers.start_worker()
    display = Display()
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
        if servers.private and not resumes:
            say(f"the other {store().give_up(batch.id):,} were cancelled, since nothing could resume them")
        raise
    except SetupError as error:
        raise SetupError(f"{error}\n{_left(batch, resumes)}") from None


def _left(batch: BatchHandle, resumes: bool) -> str:
    """Say what happens to the jobs of a private run that cannot go on. If the same command cannot resume them, they are
    cancelled, since no other worker may run them."""
    progress = batch.progress()
    if resumes and (progress.done or progress.running):
        finished = f"{progress.done:,} of the {progress.total:,} jobs of batch {batch.id} are finished"
        return f"{finished}; the others wait, and the same command resumes them"
    cancelled = store().give_up(batch.id)
    jobs = "1 waiting job" if cancelled == 1 else f"{cancelled:,} waiting jobs"
    return f"{jobs} of batch {batch.id} {'was' if cancelled == 1 else 'were'} cancelled"


def _explain(batch: BatchHandle, servers: Servers) -> None:
    """Say why nothing happens, if there is a reason. A run with a private worker then fails, since no other worker can
    take its jobs."""
    if servers.private and not fleet().members:
        say("the worker of this run is still starting")
        return
    if servers.private and store().adopt(batch.id):  # the same command was run elsewhere and had adopted them
        return
    why = reasons(batch.id)
    if why and servers.private:
        raise SetupError(f"{'; '.join(why)}; --force runs the whole file again, with the images that are here now")
    for reason in why:
        say(reason)


def export(batch: BatchHandle, report: Report, directory: Path, data: Dataset | None = None) -> None:
    """Write all result files of a batch: JSON lines, tables, the page, and the result file of the format's own
    harness."""

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
        say(f"results.parquet was not written: {error}")
    own = data.write(results(), directory, report) if data else None
    say(f"results are in {directory}: {', '.join([*written, *([own.name] if own else [])])}")


def summary(report: Report) -> dict[str, object]:
    """Return the object that `--json` prints."""
    return {
        "batch_id": report.batch_id,
        "total": report.total,
        "verdicts": dict(report.verdicts),
        "pass_at_k": {str(k): value for k, value in report.pass_at_k.items()},
        "intervals": {str(k): list(bounds) for k, bounds in report.intervals.items()},
        "tasks": report.tasks,
        "problems": report.problems,
        "excluded": report.excluded,
        "warnings": list(report.warnings),
        "near_limit": report.near_limit,
        "rerun": report.rerun,
        "deduplicated": report.deduplicated,
        "flaky": list(report.flaky),
        "seconds": report.seconds,
        "jobs_per_second": report.jobs_per_second,
    }


def exit_code(report: Report, fail_under: float | None) -> int:
    """Return 0 if done, 5 if incomplete, 6 if below the threshold. An incomplete run has no score to compare."""
    if report.excluded or report.finished < report.total:
        return 5
    return 6 if fail_under is not None and report.pass_at_k.get(1, 0.0) < fail_under else 0


def only(report: Report, ks: Collection[int]) -> Report:
    """Return the report with only these k. pass@1 is always computed, for the threshold."""
    asked = {k: value for k, value in report.pass_at_k.items() if k in ks}
    return report.model_copy(
        update={"pass_at_k": asked, "intervals": {k: each for k, each in report.intervals.items() if k in ks}}
    )
