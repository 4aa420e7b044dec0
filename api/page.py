"""`report.html`: one file that needs nothing else, to look at and to send around.

Whatever a program wrote, and every name, is text: the template escapes all it is given, after `_visible` has replaced
what would hide or reorder it. The page may use its own script and style, named by their hashes, and nothing else.

The results are read once, as a stream: of a million, what stays in memory are counts and the few samples to show.
"""

import heapq
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from zlib import crc32

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from api import plots
from schemas.job import JobSpec
from schemas.report import Report
from schemas.result import Result
from schemas.verdict import Verdict

Programs = Callable[[Sequence[str]], Mapping[str, JobSpec]]

FAILURES = 300
"""Samples that are shown with their programs; all are in results.jsonl."""
TOP = 10
"""Samples in the tables of the slowest and the hungriest."""
ROWS = 1000
"""Rows of any table: the ones with the lowest scores."""
CODE, OUTPUT, NAME = 10_000, 2_000, 120
"""Characters that are shown of a program, of any other text, and of a name."""
PART = 10
"""Programs that are in memory at once: each may have 32 MiB."""
BUCKETS = 1 << 16
"""Tasks that are told apart when the failures to show are chosen."""

_TEMPLATES = Path(__file__).parent / "templates"
_TURNING = "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_UNSEEN = dict.fromkeys([*range(32), *range(127, 160), *range(0xD800, 0xE000)], "�")
_UNSEEN |= {ord(mark): f"⟨U+{ord(mark):04X}⟩" for mark in _TURNING}
del _UNSEEN[ord("\n")], _UNSEEN[ord("\t")]


@dataclass(frozen=True, slots=True)
class Sample:
    """What the page shows of a result, whose own texts may be large."""

    job_id: str
    task: str
    name: str
    verdict: Verdict
    detail: str
    cpu_seconds: float
    peak_memory_bytes: int
    case: int | None
    """The one that failed first."""
    stdout: str
    stderr: str

    @classmethod
    def of(cls, result: Result) -> "Sample":
        """Cut to what is shown: the beginning of what is compared, and the end of what is only read."""
        case = next((case.index for case in result.cases if case.verdict is not Verdict.PASSED), None)
        return cls(
            result.job_id,
            "" if result.task_id is None else _short(result.task_id),
            result.job_id if result.sample_id is None else _short(result.sample_id),
            result.verdict,
            _head(result.detail, OUTPUT),
            result.metrics.cpu_seconds,
            result.metrics.peak_memory_bytes,
            case,
            _tail(result.stdout) if case is None else _head(result.stdout, OUTPUT),
            _tail(result.stderr),
        )


class Top:
    """The samples with the largest keys, no two of which are equal."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.heap: list[tuple[tuple[float, int], Sample]] = []

    def offer(self, key: tuple[float, int], result: Result) -> None:
        """Keep it if it is among them."""
        if len(self.heap) < self.size:
            heapq.heappush(self.heap, (key, Sample.of(result)))
        elif key > self.heap[0][0]:
            heapq.heapreplace(self.heap, (key, Sample.of(result)))

    def best(self) -> list[tuple[tuple[float, int], Sample]]:
        """From the largest key down."""
        return sorted(self.heap, reverse=True)


class Overview:
    """What one pass over the results leaves."""

    def __init__(self, results: Iterator[Result]) -> None:
        self.cpu = plots.Histogram("CPU time", plots.SECONDS)
        self.memory = plots.Histogram("peak memory", plots.MEBIBYTES)
        self.slowest, self.hungriest = Top(TOP), Top(TOP)
        self.last: datetime | None = None
        self._failures: defaultdict[Verdict, Top] = defaultdict(lambda: Top(FAILURES))
        self._turns: Counter[tuple[Verdict, int]] = Counter()
        for seq, result in enumerate(results):
            self.last = result.finished_at if self.last is None else max(self.last, result.finished_at)
            if result.verdict.scored:
                self._measure(-seq, result)
            if result.verdict not in (Verdict.PASSED, Verdict.CANCELLED):
                self._fail(-seq, result)

    def _measure(self, order: int, result: Result) -> None:
        used = result.metrics
        self.cpu.add(used.cpu_seconds, passed=result.passed)
        self.memory.add(used.peak_memory_bytes / (1 << 20), passed=result.passed)
        self.slowest.offer((used.cpu_seconds, order), result)
        self.hungriest.offer((used.peak_memory_bytes, order), result)

    def _fail(self, order: int, result: Result) -> None:
        """Of each verdict, the first failure of every task goes before the second of any."""
        task = result.job_id if result.task_id is None else str(result.task_id)
        bucket = result.verdict, crc32(task.encode(errors="replace")) % BUCKETS
        self._failures[result.verdict].offer((-self._turns[bucket], order), result)
        self._turns[bucket] += 1

    def failures(self) -> list[Sample]:
        """As many of each verdict as there is room for, in the order of the batch."""
        placed = [
            (place, order, sample)
            for top in self._failures.values()
            for place, ((_, order), sample) in enumerate(top.best())
        ]
        chosen = sorted(placed, key=lambda each: each[0])[:FAILURES]
        return [sample for _, _, sample in sorted(chosen, key=lambda each: -each[1])]


@dataclass(frozen=True, slots=True)
class Text:
    """One block of a failure."""

    title: str
    text: str
    numbered: bool = False

    @property
    def lines(self) -> str:
        """Their numbers, to stand beside them."""
        return "\n".join(map(str, range(1, self.text.removesuffix("\n").count("\n") + 2)))


def page(report: Report, results: Callable[[], Iterator[Result]], programs: Programs) -> str:
    """The report as a page. `programs` gives the jobs of some ids, as far as they are still known."""
    overview = Overview(results())
    failures = overview.failures()
    files = {name: (_TEMPLATES / f"report.{name}").read_text("utf-8") for name in ("css", "js")}
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = _short
    environment.filters["n"] = "{:,}".format
    return environment.get_template("report.html").render(
        report=report,
        overview=overview,
        plots=plots,
        Verdict=Verdict,
        rows=ROWS,
        failed=report.finished - report.verdicts.get(Verdict.PASSED, 0) - report.verdicts.get(Verdict.CANCELLED, 0),
        failures=list(zip(failures, _texts(failures, programs), strict=True)),
        anchors={sample.job_id: f"f{number}" for number, sample in enumerate(failures)},
        task_anchors={sample.task: f"f{number}" for number, sample in reversed([*enumerate(failures)])},
        hashes={name: b64encode(sha256(text.encode()).digest()).decode() for name, text in files.items()},
        files={name: Markup(text) for name, text in files.items()},
    )


def _texts(failures: Sequence[Sample], programs: Programs) -> Iterator[list[Text]]:
    for start in range(0, len(failures), PART):
        part = failures[start : start + PART]
        specs = programs([sample.job_id for sample in part])
        for sample in part:
            yield [*_asked(sample, specs.get(sample.job_id)), *_said(sample)]


def _asked(sample: Sample, spec: JobSpec | None) -> Iterator[Text]:
    """The program, and what was wanted of it."""
    if spec is None:
        return
    yield Text("program", _head(spec.code, CODE), numbered=True)
    if spec.check:
        yield Text("check", _head(spec.check, OUTPUT), numbered=True)
    if spec.stdin:
        yield Text("standard input", _head(spec.stdin, OUTPUT))
    if sample.case is not None:
        case = spec.cases[sample.case]
        yield Text(f"case {sample.case}: input", _head(case.stdin, OUTPUT))
        yield Text(f"case {sample.case}: expected ({case.comparator})", _head(case.expected, OUTPUT))


def _said(sample: Sample) -> Iterator[Text]:
    if sample.case is not None:
        yield Text(f"case {sample.case}: got", sample.stdout)
    elif sample.stdout:
        yield Text("standard output", sample.stdout)
    if sample.stderr:
        yield Text("standard error", sample.stderr)


def _visible(value: object) -> object:
    """Text in which every character shows itself: none ends the page, hides or turns its neighbours around."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return value.replace("\r\n", "\n").translate(_UNSEEN)
    return value


def _short(name: object) -> str:
    text = str(name)
    return text if len(text) <= NAME else text[:NAME] + "…"


def _head(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[:size]}\n… {len(text) - size:,} more characters"


def _tail(text: str) -> str:
    return text if len(text) <= OUTPUT else f"{len(text) - OUTPUT:,} more characters …\n{text[-OUTPUT:]}"
