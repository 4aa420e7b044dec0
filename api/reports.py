"""A batch summed up: the numbers, and the same for a terminal."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from api.tally import Tally
from schemas.report import Report, Score, Spread, interval, mean_pass_at_k, pass_at_k, spread
from schemas.store import Store
from schemas.terminal import plain
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
    """The report of a batch as far as it has come, from its results one at a time."""
    batch = store.batch(batch_id)
    repeats = batch.about.get("repeat", 1)
    tally = Tally(samples=batch.total // repeats, repeats=repeats)
    for row in store.measures(batch_id):
        tally.add(row)
    tasks = tally.problems()
    scores = mean_pass_at_k(tasks, sorted(set(ks)))
    sizes = [scored for scored, _ in tasks] or [0]
    return Report(
        batch_id=batch.id,
        name=batch.name,
        total=tally.samples,
        finished=tally.finished,
        verdicts={verdict: count for verdict in Verdict if (count := tally.verdicts[verdict])},
        tasks=sum(tasks.values()),
        problems=batch.about.get("problems"),
        samples_per_task=(min(sizes), max(sizes)),
        excluded=sum(count for verdict, count in tally.verdicts.items() if not verdict.scored),
        pass_at_k=scores,
        intervals={k: _interval(tasks, k) for k in scores},
        by_task=tally.by_task(),
        by_label=tally.by_label(),
        near_limit=tally.near_limit,
        rerun=tally.rerun,
        deduplicated=tally.deduplicated,
        cached=tally.cached,
        repeats=repeats,
        flaky=tuple(sorted(tally.flaky)),
        seconds=max(0.0, tally.last - batch.created_at.timestamp()),
        cpu_seconds=spread(tally.cpu),
        wall_seconds=spread(tally.wall),
        peak_memory_bytes=spread(tally.memory),
        made={**batch.about, **{name: dict(counts) for name, counts in tally.made.items() if counts}},
    )


def _interval(tasks: Mapping[tuple[int, int], int], k: int) -> tuple[float, float]:
    values: Counter[float] = Counter()
    for (scored, passed), times in tasks.items():
        values[pass_at_k(scored, passed, k)] += times
    return interval(values)


def render(report: Report) -> RenderableType:
    """The report for a terminal."""
    title = f"batch {report.batch_id}" + (f" · {report.name}" if report.name else "")
    parts: list[RenderableType] = [Text(_line(title), style="bold"), _scores(report), _verdicts(report), _usage(report)]
    parts += [_label(name, values) for name, values in report.by_label.items()]
    parts += [Text(note, style) for note, style in notes(report)]
    return Group(*parts)


def notes(report: Report) -> Iterable[tuple[str, str]]:
    """What a reader must know to trust the numbers, and how loudly to say it."""
    if report.excluded:
        yield (
            f"{report.excluded} jobs have no verdict on their program: left out of every score.",
            "bold magenta",
        )
    if report.finished < report.total:
        yield f"{report.total - report.finished:,} jobs are not finished yet.", "bold magenta"
    if report.flaky:
        some = ", ".join(report.flaky[:10]) + (" …" if len(report.flaky) > 10 else "")
        yield f"{len(report.flaky)} samples are flaky (different verdicts in {report.repeats} runs): {some}", "yellow"
    if report.near_limit:
        yield f"{report.near_limit} verdicts are within 20 % of a limit; --calibrate fits it to this machine.", "yellow"
    if report.rerun:
        why = "starved of CPU time, or paused, at their time limit"
        yield f"{report.rerun} jobs were {why} and run again.", "bright_black"
    if report.deduplicated:
        earlier = f", {report.cached:,} of them from earlier batches" if report.cached else ""
        yield f"{report.deduplicated:,} jobs are identical to others and share their result{earlier}.", "bright_black"


def coverage(report: Report) -> str:
    """How much of the benchmark the score is about."""
    fewest, most = report.samples_per_task
    each = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    problems = f"{report.tasks:,}" + (f"/{report.problems:,}" if report.problems else "")
    return f"{problems} problems, {report.finished - report.excluded:,} samples ({each} of each)"


def scores(report: Report) -> dict[str, float]:
    """The scores by their usual names, as scripts look for them on the last line."""
    return {f"pass@{k}": value for k, value in report.pass_at_k.items()}


def _scores(report: Report) -> Group:
    table = Table.grid(padding=(0, 2))
    for k, value in report.pass_at_k.items():
        low, high = report.intervals.get(k, (value, value))
        table.add_row(Text(f"pass@{k}", "bold"), Text(f"{value:.4f}", "bold green"), f"95 %: {low:.3f} to {high:.3f}")
    rest = Table.grid(padding=(0, 2))
    rest.add_row("coverage", coverage(report))
    rest.add_row("speed", f"{report.jobs_per_second:,.1f} jobs per second, {report.seconds:,.1f} s in all")
    return Group(table, rest)


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


def _label(name: str, values: Mapping[str, Score]) -> Table:
    table = _table(escape(_line(name[:60])), "passed", "scored", "share")
    for value, score in sorted(values.items()):
        table.add_row(Text(_line(value[:60])), f"{score.passed:,}", f"{score.scored:,}", f"{score.rate:.1%}")
    return table


def _line(text: str) -> str:
    """Text from a caller or a program, safe for a terminal and on one line."""
    return plain(text).replace("\n", " ")


def _cells(values: Spread, unit: int, name: str, digits: int) -> Iterable[str]:
    return (f"{value / unit:,.{digits}f} {name}" for value in (values.median, values.p95, values.largest))


def _table(first: str, *rest: str) -> Table:
    table = Table(box=ROUNDED, border_style="bright_black", header_style="bold")
    table.add_column(first, min_width=13)
    for heading in rest:
        table.add_column(heading, justify="right", min_width=9)
    return table
