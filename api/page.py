"""`report.html`: one file that needs nothing else. Whatever a program wrote is escaped text."""

from collections.abc import Iterable
from html import escape

from schemas.report import Report, Spread
from schemas.result import Result

FAILURES = 200
"""Jobs that are shown in full; the rest are in results.jsonl."""
EXCERPT = 2000
"""Characters of a program's error output that are shown: the last ones."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0; width: 100% }}
th, td {{ text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #ddd; vertical-align: top }}
.bar {{ background: #c66; height: .8rem }} .passed .bar {{ background: #5a5 }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: 12px; max-height: 12rem; overflow: auto }}
big {{ font-size: 2rem; margin-right: 2rem }}
</style></head><body>
<h1>{title}</h1>
<p>{scores}</p>
<p>{coverage}</p>
<table><tr><th>verdict</th><th>jobs</th><th style="width: 50%"></th></tr>{verdicts}</table>
<table><tr><th>per job</th><th>median</th><th>p95</th><th>largest</th></tr>{spreads}</table>
<h2>Failures</h2>
<table><tr><th>job</th><th>task</th><th>verdict</th><th>what happened</th></tr>{failures}</table>
</body></html>
"""


def page(report: Report, results: Iterable[Result]) -> str:
    """The report as a page, with the first failures in full."""
    failed = (result for result in results if not result.passed)
    scored = report.finished - report.excluded
    return _PAGE.format(
        title=escape(f"{report.name or 'batch'} · {report.batch_id}"),
        scores=" ".join(f"<big>pass@{k} {value:.4f}</big>" for k, value in report.pass_at_k.items()),
        coverage=(
            f"{scored:,} of {report.total:,} jobs scored, {report.tasks:,} problems, "
            f"{report.seconds:.1f} s, {report.jobs_per_second:.1f} jobs per second"
        ),
        verdicts="".join(
            f'<tr class="{verdict}"><td>{verdict}</td><td>{count:,}</td>'
            f'<td><div class="bar" style="width: {100 * count / report.finished:.1f}%"></div></td></tr>'
            for verdict, count in report.verdicts.items()
        ),
        spreads=_spread("CPU time, s", report.cpu_seconds, 1)
        + _spread("wall time, s", report.wall_seconds, 1)
        + _spread("peak memory, MiB", report.peak_memory_bytes, 1 << 20),
        failures="".join(_failure(result) for result, _ in zip(failed, range(FAILURES), strict=False)),
    )


def _spread(name: str, values: Spread, unit: int) -> str:
    cells = "".join(f"<td>{value / unit:,.3f}</td>" for value in (values.median, values.p95, values.largest))
    return f"<tr><td>{name}</td>{cells}</tr>"


def _failure(result: Result) -> str:
    task = "" if result.task_id is None else f"{result.task_id}"
    return (
        f"<tr><td>{escape(result.job_id)}</td><td>{escape(task)}</td><td>{result.verdict}</td>"
        f"<td>{escape(result.detail)}<pre>{escape(result.stderr[-EXCERPT:])}</pre></td></tr>"
    )
