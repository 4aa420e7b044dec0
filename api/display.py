"""How far a run has come, on stderr: a live bar on a terminal, otherwise a plain line now and then."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from api.reports import COLOURS, OTHER
from schemas.batch import Progress
from schemas.verdict import Verdict

LINE_EVERY = 10.0
"""Seconds between two plain lines."""
STUCK_AFTER = 20.0
"""Seconds without a finished job after which it is said what the run waits for."""


class Display:
    """Shows each `Progress` it is given."""

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
        self._began = self._said = self._moved = time.monotonic()

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Show where the batch is now."""
        now = time.monotonic()
        if self._first is None:
            self._first = progress.done  # what an earlier run did says nothing about this one's speed
        if progress.done != self._done:
            self._done, self._moved = progress.done, now
        rate = (progress.done - self._first) / max(now - self._began, 1e-9)
        if self._console.is_terminal:
            verdicts = "  ".join(f"[{COLOURS.get(v, OTHER)}]{v} {n}[/]" for v, n in progress.verdicts.items())
            fields: dict[str, Any] = {"rate": rate, "score": _score(progress), "verdicts": verdicts}
            self._bar.update(self._task, completed=progress.done, total=progress.total, **fields)
        elif now - self._said >= LINE_EVERY:
            self._said = now
            self._console.print(_line(progress, rate), soft_wrap=True)
        if now - self._moved >= STUCK_AFTER and not progress.complete:
            self._moved = now
            self._console.print(_stuck(progress), soft_wrap=True)


def _line(progress: Progress, rate: float) -> str:
    left = f", about {(progress.total - progress.done) / rate:.0f} s left" if rate else ""
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in progress.verdicts.items())
    said = f"{_score(progress)}, {verdicts}" if verdicts else "no verdict yet"
    return f"{progress.done} of {progress.total} finished, {rate:.1f} per second{left}: {said}"


def _score(progress: Progress) -> str:
    """pass@1 so far, as if every problem had as many samples as the others."""
    scored = sum(count for verdict, count in progress.verdicts.items() if verdict.scored)
    return f"pass@1 {progress.verdicts.get(Verdict.PASSED, 0) / scored:.3f}" if scored else "pass@1 –"


def _stuck(progress: Progress) -> str:
    waiting = f"nothing finished for {STUCK_AFTER:.0f} s: {progress.running} running, {progress.queued} queued"
    return waiting if progress.running else f"{waiting}; is a worker up?"
