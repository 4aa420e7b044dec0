"""A batch summed up: the numbers, and the same for a terminal."""

from collections.abc import Collection, Iterable

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from schemas.report import Report, Spread, mean_pass_at_k, spread
from schemas.store import Store
from schemas.verdict import Verdict

COLOURS = {
    Verdict.PASSED: "green",
    Verdict.WRONG_ANSWER: "red",
    Verdict.CANCELLED: "bright_black",
    Verdict.SANDBOX_ERROR: "bold magenta",
}
"""Of the verdicts that stand out; the rest are failures of one kind or another."""
OTHER = "yellow"
BAR = 30
"""Width of the longest bar, in characters."""


def build(store: Store, batch_id: str, ks: Collection[int]) -> Report:
    """The report of a batch as far as it has come."""
    batch = store.batch(batch_id)
    measures = store.measures(batch_id)
    verdicts = dict.fromkeys(Verdict, 0)
    tasks: dict[object, tuple[int, int]] = {}
    scored = []
    for row in measures:
        verdict = Verdict(row.verdict)
        verdicts[verdict] += 1
        if not verdict.scored:
            continue
        scored.append(row)
        task = row.seq if row.task_id is None else row.task_id  # a job without a task is a problem of its own
        samples, passed = tasks.get(task, (0, 0))
        tasks[task] = (samples + 1, passed + (verdict is Verdict.PASSED))
    last = max((row.finished_at for row in measures), default=0.0)
    return Report(
        batch_id=batch.id,
        name=batch.name,
        total=batch.total,
        finished=len(measures),
        verdicts={verdict: count for verdict, count in verdicts.items() if count},
        tasks=len(tasks),
        excluded=len(measures) - len(scored),
        pass_at_k=mean_pass_at_k(tasks, sorted(set(ks))),
        seconds=max(0.0, last - batch.created_at.timestamp()),
        cpu_seconds=spread([row.cpu_seconds for row in scored]),
        wall_seconds=spread([row.wall_seconds for row in scored]),
        peak_memory_bytes=spread([row.peak_memory_bytes for row in scored]),
    )


def render(report: Report) -> RenderableType:
    """The report for a terminal."""
    title = f"batch {report.batch_id}" + (f" · {report.name}" if report.name else "")
    parts: list[RenderableType] = [Text(title, style="bold"), _scores(report), _verdicts(report), _usage(report)]
    if report.excluded:
        left_out = f"{report.excluded} jobs have no verdict on their program and are left out of every score."
        parts.append(Text(left_out, style="bold magenta"))
    return Group(*parts)


def scores(report: Report) -> dict[str, float]:
    """The scores by their usual names, as scripts look for them on the last line."""
    return {f"pass@{k}": value for k, value in report.pass_at_k.items()}


def _scores(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in scores(report).items():
        table.add_row(Text(name, "bold"), Text(f"{value:.4f}", "bold green"))
    scored = report.finished - report.excluded
    table.add_row("coverage", f"{scored:,} of {report.total:,} jobs scored, {report.tasks:,} problems")
    table.add_row("speed", f"{report.jobs_per_second:,.1f} jobs per second, {report.seconds:,.1f} s in all")
    return table


def _verdicts(report: Report) -> Table:
    table = _table("verdict", "jobs", "share")
    table.add_column(width=BAR)
    largest = max(report.verdicts.values(), default=1)
    for verdict, count in report.verdicts.items():
        colour = COLOURS.get(verdict, OTHER)
        bar = "█" * max(1, round(BAR * count / largest))
        table.add_row(Text(verdict, colour), f"{count:,}", f"{count / report.finished:.1%}", Text(bar, colour))
    return table


def _usage(report: Report) -> Table:
    table = _table("per job", "median", "p95", "largest")
    table.add_row("CPU time", *_cells(report.cpu_seconds, 1, "s", 3))
    table.add_row("wall time", *_cells(report.wall_seconds, 1, "s", 3))
    table.add_row("peak memory", *_cells(report.peak_memory_bytes, 1 << 20, "MiB", 1))
    return table


def _cells(values: Spread, unit: int, name: str, digits: int) -> Iterable[str]:
    return (f"{value / unit:,.{digits}f} {name}" for value in (values.median, values.p95, values.largest))


def _table(first: str, *rest: str) -> Table:
    table = Table(box=ROUNDED, border_style="bright_black", header_style="bold")
    table.add_column(first, min_width=13)
    for heading in rest:
        table.add_column(heading, justify="right", min_width=9)
    return table
