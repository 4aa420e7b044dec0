"""Builds the report of a batch, and renders it for a terminal."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from evalpool.api.reports.tally import Tally
from evalpool.schemas.report import Report, Score, Spread, interval, mean_pass_at_k, pass_at_k, spread
from evalpool.schemas.store import Store
from evalpool.schemas.terminal import plain
from evalpool.schemas.verdict import Verdict

COLOURS = {
    Verdict.PASSED: "green",
    Verdict.WRONG_ANSWER: "red",
    Verdict.CANCELLED: "bright_black",
    Verdict.SANDBOX_ERROR: "bold magenta",
}
"""The colours of verdicts that stand out. All others are failures of the program and have the colour `OTHER`."""
OTHER = "yellow"
BAR = 30
"""The width of the longest bar, in characters."""
REASON = 120
"""How many characters of the reason of a failure are shown."""


def build(store: Store, batch_id: str, ks: Collection[int]) -> Report:
    """Build the report of a batch from the results so far, which are read one at a time."""
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
        warnings=tuple(tally.symptoms.warnings()),
        failures=tally.symptoms.failures(),
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
    """Render the report for a terminal."""
    title = f"batch {report.batch_id}" + (f" · {report.name}" if report.name else "")
    parts: list[RenderableType] = [Text(_line(title), style="bold"), _scores(report), _verdicts(report), _usage(report)]
    if report.failures:
        parts.append(_failures(report))
    parts += [_label(name, values) for name, values in report.by_label.items()]
    parts += [Text(note.text, note.style) for note in _notes(report)]
    return Group(*parts)


class _Note(NamedTuple):
    text: str
    style: str


def _notes(report: Report) -> Iterator[_Note]:
    """Yield what a reader must know to trust the numbers, the most important first."""
    for warning in report.warnings:
        yield _Note(_line(warning), "bold red")
    if report.tasks and not report.pass_at_k:
        fewest = _count(report.samples_per_task[0], "scored sample")
        yield _Note(f"There is no pass@k: a problem has {fewest}, and k must not be larger than that.", "bold magenta")
    if report.excluded:
        text = f"{_are(report.excluded, 'job')} left out of every score, for lack of a verdict on the program."
        yield _Note(text, "bold magenta")
    if report.finished < report.total:
        yield _Note(f"{_are(report.total - report.finished, 'job')} not finished yet.", "bold magenta")
    if report.flaky:
        some = ", ".join(report.flaky[:10]) + (" …" if len(report.flaky) > 10 else "")
        text = f"{_are(len(report.flaky), 'sample')} flaky (different verdicts in {report.repeats} runs): {some}"
        yield _Note(text, "yellow")
    if report.near_limit:
        text = (
            f"{_are(report.near_limit, 'verdict')} within 20 % of a limit; --calibrate fits the limits to this machine."
        )
        yield _Note(text, "yellow")
    if report.rerun:
        text = f"{_count(report.rerun, 'job')} ran again after being starved of CPU time, or paused, at the time limit."
        yield _Note(text, "bright_black")
    if report.deduplicated:
        earlier = f", {report.cached:,} of them from earlier batches" if report.cached else ""
        text = f"{_count(report.deduplicated, 'job')} took the result of an identical job{earlier}."
        yield _Note(text, "bright_black")


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _are(number: int, thing: str) -> str:
    return f"{_count(number, thing)} {'is' if number == 1 else 'are'}"


def coverage(report: Report) -> str:
    """Say how much of the benchmark the scores cover."""
    fewest, most = report.samples_per_task
    each = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    of = f"/{report.problems:,}" if report.problems else ""
    problems = f"{report.tasks:,}{of} {'problem' if (report.problems or report.tasks) == 1 else 'problems'}"
    return f"{problems}, {_count(report.finished - report.excluded, 'sample')} ({each} of each)"


def scores(report: Report) -> dict[str, float]:
    """Return the scores by their usual names (pass@1), as harnesses write them and scripts look for them."""
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


def _failures(report: Report) -> Table:
    table = _table("verdict", "jobs")
    table.add_column("most frequent reasons")
    for failure in report.failures:
        colour, reason = COLOURS.get(failure.verdict, OTHER), _line(failure.reason[:REASON])
        table.add_row(Text(failure.verdict, colour), f"{failure.samples:,}", Text(reason))
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
    """Return text from a caller or a program on one line, safe for a terminal."""
    return plain(text).replace("\n", " ")


def _cells(values: Spread, unit: int, name: str, digits: int) -> Iterator[str]:
    return (f"{value / unit:,.{digits}f} {name}" for value in (values.median, values.p95, values.largest))


def _table(first: str, *rest: str) -> Table:
    table = Table(box=ROUNDED, border_style="bright_black", header_style="bold")
    table.add_column(first, min_width=13)
    for heading in rest:
        table.add_column(heading, justify="right", min_width=9)
    return table
