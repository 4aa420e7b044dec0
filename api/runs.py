"""The story of `evalpool run`: read, submit, follow, export."""

from collections.abc import Collection
from pathlib import Path

from rich.console import Console

from api.display import Display
from api.embedded import Servers
from api.formats import Dataset
from api.handles import BatchHandle
from api.jobs import submit_batch
from api.page import page
from schemas.job import JobSpec
from schemas.report import Report
from schemas.settings import settings

notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
"""For all that is not a result: stdout carries results only."""


def load(data: Dataset) -> list[JobSpec]:
    """All jobs of a file, every one of them valid, and a line that says what was found."""
    specs = list(data.jobs())
    tasks = {spec.task_id for spec in specs if spec.task_id is not None}
    notes.print(f"format: {data.title} ({len(specs):,} jobs" + (f", {len(tasks):,} tasks)" if tasks else ")"))
    return specs


def submit(data: Dataset, specs: list[JobSpec], *, force: bool) -> BatchHandle:
    """Submit a file's jobs, or take up the batch that the same file and options made before."""
    key = None if force else data.digest(settings().image)
    return submit_batch(specs, name=Path(data.lines.name).name, idempotency_key=key)


def follow(batch: BatchHandle, servers: Servers, display: Display, *, resumes: bool = True) -> None:
    """Wait until the batch is complete, showing how far it is, as long as there is somebody to run it."""
    if batch.progress().complete:
        notes.print(f"batch {batch.id} was finished before; --force runs it again")
        return
    servers.start_worker()
    try:
        with display:
            for progress in batch.watch():
                display.update(progress)
                servers.check()
    except KeyboardInterrupt:
        how = "the same command again resumes it" if resumes else f"`evalpool report {batch.id}` shows them"
        notes.print(f"\ninterrupted; the finished jobs of batch {batch.id} are kept: {how}")
        raise


def export(batch: BatchHandle, data: Dataset, report: Report, directory: Path) -> None:
    """Write `results.jsonl`, the format's own result file and `report.html`."""
    with (directory / "results.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(result.model_dump_json() + "\n" for result in batch.stream())
    data.write(batch.stream(), directory)
    (directory / "report.html").write_text(page(report, batch.stream()), encoding="utf-8")
    notes.print(f"results: {directory}/results.jsonl, report.html")


def summary(report: Report) -> dict[str, object]:
    """The one JSON object that scripts read."""
    return {
        "batch_id": report.batch_id,
        "total": report.total,
        "verdicts": dict(report.verdicts),
        "pass_at_k": {str(k): value for k, value in report.pass_at_k.items()},
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
    return report.model_copy(update={"pass_at_k": {k: v for k, v in report.pass_at_k.items() if k in ks}})
