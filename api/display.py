"""Shows the progress of a run on stderr: a live bar on a terminal, otherwise a plain line from time to time."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from evalpool.api.reports.summary import COLOURS, OTHER
from evalpool.schemas.batch import Progress
from evalpool.schemas.verdict import Verdict

LINE_EVERY = 10.0
"""Seconds between two plain lines."""
STUCK_AFTER = 20.0
"""Seconds without a finished job after which a line says so."""


class Display:
    """Shows the progress of one batch."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._bar = Bar(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.1f}/s"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[score]}"),
            TextColumn("{task.fields[verdicts]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, rate=0.0, score="", verdicts="")
        self._first: int | None = None
        self._done = -1
        self._start_time = self._line_time = self._change_time = time.monotonic()

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Show the present progress of the batch."""
        now = time.monotonic()
        if self._first is None:
            self._first = progress.done  # jobs of an earlier run do not count for the speed of this one
        if progress.done != self._done:
            self._done, self._change_time = progress.done, now
        rate = (progress.done - self._first) / max(now - self._start_time, 1e-9)
        if self._console.is_terminal:
            verdicts = "  ".join(f"[{COLOURS.get(v, OTHER)}]{v} {n}[/]" for v, n in progress.verdicts.items())
            fields: dict[str, Any] = {"rate": rate, "score": _score(progress), "verdicts": verdicts}
            self._bar.update(self._task, completed=progress.done, total=progress.total, **fields)
        elif now - self._line_time >= LINE_EVERY:
            self._line_time = now
            self._console.print(_line(progress, rate), soft_wrap=True)
        if now - self._change_time >= STUCK_AFTER and not progress.complete:
            self._change_time = now
            self._console.print(_stuck(progress), soft_wrap=True)


def _line(progress: Progress, rate: float) -> str:
    left = f", about {(progress.total - progress.done) / rate:.0f} s left" if rate else ""
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in progress.verdicts.items())
    outcome = f"{_score(progress)}, {verdicts}" if verdicts else "no verdicts yet"
    return f"{progress.done:,} of {progress.total:,} finished, {rate:.1f} per second{left}: {outcome}"


def _score(progress: Progress) -> str:
    """Return pass@1 so far, as if all problems had the same number of samples."""
    scored = sum(count for verdict, count in progress.verdicts.items() if verdict.scored)
    return f"pass@1 {progress.verdicts.get(Verdict.PASSED, 0) / scored:.3f}" if scored else "pass@1 –"


def _stuck(progress: Progress) -> str:
    waiting = f"no job finished for {STUCK_AFTER:.0f} s: {progress.running:,} running, {progress.queued:,} queued"
    return waiting if progress.running else f"{waiting}; is a worker running?"
