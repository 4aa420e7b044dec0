"""Draws plots as inline SVG. Horizontal positions are percentages, so that plots fit any width while their text keeps
its size. Colours come from the page's style sheet, by class, since the page's policy forbids style attributes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, pairwise
from math import ceil, floor, log, log2

from markupsafe import Markup

HEIGHT = 170
"""The height of a plot in pixels, without the labels below it."""
BELOW = 44
"""The height of the labels in pixels."""
PER_DOUBLING = 4
"""Bins of a histogram from one value to its double."""
FEWEST = 12
"""The minimum number of bins, so that two bars do not fill the whole width."""
LABELS = 5
"""The maximum number of marks along an axis, which fit on a phone."""

SECONDS = {
    m * 10.0**e: f"{m * 10 ** (e + 3)} ms" if e < 0 else f"{m * 10**e:,} s" for e in range(-3, 6) for m in (1, 2, 5)
}
MEBIBYTES = {2.0**n: f"{2**n} MiB" if n < 10 else f"{2 ** (n - 10):,} GiB" for n in range(21)}
"""The marks that an axis may have. Smaller values count as the first mark."""

_LINE = Markup('<line class="{}" x1="{:.2f}%" x2="{:.2f}%" y1="{:.1f}" y2="{:.1f}"/>')
_POINT = Markup('<circle cx="{:.2f}%" cy="{:.1f}" r="5"/>')
_LEVEL = Markup('<text class="y" x="-8" y="{:.1f}">{}</text>')
_MARK = Markup('<text class="x" x="{:.2f}%" y="{}">{}</text>')
_RECT = Markup('<rect class="{}" x="{:.2f}%" width="{:.2f}%" y="{:.1f}" height="{:.1f}"/>')


def bar(share: float, kind: str) -> Markup:
    """Draw a bar that is filled up to a share. Screen readers skip it, since the number stands beside it."""
    return Markup(
        '<svg class="bar" aria-hidden="true"><rect class="track" width="100%" height="100%"/>'
        '<rect class="{}" width="{:.2f}%" height="100%"/></svg>'
    ).format(kind, 100 * share)


def whisker(value: float, low: float, high: float) -> Markup:
    """Draw a value between 0 and 1 with its interval."""
    return Markup('<svg class="whisker" role="img"><title>{}</title>{}{}{}</svg>').format(
        f"{value:.1%}, 95 % interval {low:.1%} to {high:.1%}",
        _LINE.format("grid", 0, 100, 8, 8),
        _LINE.format("interval", 100 * low, 100 * high, 8, 8),
        _POINT.format(100 * value, 8),
    )


def curve(scores: Mapping[int, float], intervals: Mapping[int, tuple[float, float]]) -> Markup:
    """Draw pass@k for two or more values of k, on a logarithmic axis."""
    ks = sorted(scores)
    across = {k: 8 + 84 * log(k / ks[0]) / log(ks[-1] / ks[0]) for k in ks}
    parts = [_grid(share / 4, f"{share / 4:.0%}") for share in range(5)]
    for one, two in pairwise(ks):
        parts.append(_LINE.format("curve", across[one], across[two], _down(scores[one]), _down(scores[two])))
    for k in ks:
        low, high = intervals.get(k, (scores[k], scores[k]))
        parts.append(_LINE.format("interval", across[k], across[k], _down(low), _down(high)))
        parts.append(_POINT.format(across[k], _down(scores[k])))
        parts.append(_MARK.format(across[k], HEIGHT + 18, k))
    return _plot(", ".join(f"pass@{k} {scores[k]:.1%}" for k in ks), "k", parts)


class Histogram:
    """Counts passed and failed samples over a quantity, on a logarithmic axis. Its memory depends on the range of the
    values, not on their number."""

    def __init__(self, quantity: str, marks: Mapping[float, str]) -> None:
        self.quantity = quantity
        self.marks = marks
        self.smallest = min(marks)
        self.passed: Counter[int] = Counter()
        self.failed: Counter[int] = Counter()

    def add(self, value: float, *, passed: bool) -> None:
        """Count one sample."""
        place = floor(PER_DOUBLING * log2(max(value, self.smallest)))
        (self.passed if passed else self.failed)[place] += 1

    def svg(self) -> Markup:
        """Draw the histogram; empty if nothing was counted."""
        counts = self.passed + self.failed
        if not counts:
            return Markup("")
        missing = max(0, FEWEST - (max(counts) - min(counts) + 1))
        first, last = min(counts) - missing // 2, max(counts) + 1 + ceil(missing / 2)
        step = next(step for step in _steps() if max(counts.values()) <= 4 * step)
        top = step * ceil(max(counts.values()) / step)
        parts = [_grid(height / top, f"{height:,}") for height in range(0, top + 1, step)]
        parts += [self._bar(place, first, 100 / (last - first), HEIGHT / top) for place in sorted(counts)]
        marks = [mark for mark in self.marks if first <= PER_DOUBLING * log2(mark) <= last]
        for mark in marks[:: ceil(len(marks) / LABELS) or 1]:
            across = 100 * (PER_DOUBLING * log2(mark) - first) / (last - first)
            parts.append(_MARK.format(across, HEIGHT + 18, self.marks[mark]))
        title = f"{self.quantity}: {self.passed.total():,} samples passed, {self.failed.total():,} failed"
        return _plot(title, f"{self.quantity}, logarithmic", parts)

    def _bar(self, place: int, first: int, width: float, unit: float) -> Markup:
        passed, failed = self.passed[place], self.failed[place]
        x, gap = width * (place - first), width * 0.08
        return Markup("<g><title>{:,} passed, {:,} failed</title>{}{}</g>").format(
            passed,
            failed,
            _RECT.format("passed", x + gap, width - 2 * gap, HEIGHT - passed * unit, passed * unit),
            _RECT.format("failed", x + gap, width - 2 * gap, HEIGHT - (passed + failed) * unit, failed * unit),
        )


def _plot(title: str, axis: str, parts: Iterable[Markup]) -> Markup:
    below = _MARK.format(50, HEIGHT + 38, axis)
    return Markup('<svg class="plot" role="img" height="{}"><title>{}</title>{}{}</svg>').format(
        HEIGHT + BELOW, title, Markup("").join(parts), below
    )


def _grid(share: float, label: str) -> Markup:
    return _LINE.format("grid", 0, 100, _down(share), _down(share)) + _LEVEL.format(_down(share), label)


def _down(share: float) -> float:
    return HEIGHT * (1 - share)


def _steps() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, …"""
    for power in count():
        yield from (10**power, 2 * 10**power, 5 * 10**power)
