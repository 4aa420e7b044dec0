"""`report.html`: one file that needs nothing else, to look at and to send around.

Whatever a program wrote, and every name, is text: the template escapes all it is given, after `_visible` has replaced
what would hide or reorder it. The page may use its own script and style, named by their hashes, and nothing else.

The results are read once, as a stream: of a million, what stays in memory are counts and the few samples to show.
"""

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from api import plots
from api.overview import OUTPUT, Overview, Sample, head, short
from schemas.job import JobSpec
from schemas.report import Report
from schemas.result import Result
from schemas.verdict import Verdict

Programs = Callable[[Sequence[str]], Mapping[str, JobSpec]]

ROWS = 1000
"""Rows of any table: the ones with the lowest scores."""
CODE = 10_000
"""Characters that are shown of a program."""
PART = 10
"""Programs that are in memory at once: each may have 32 MiB."""
_TEMPLATES = Path(__file__).parent / "templates"
_HIDDEN = "\u00ad\u034f\u180e\u200b\u2060\u3164\ufeff\ufff9\ufffa\ufffb"
_TURNING = "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_UNSEEN = dict.fromkeys([*range(32), *range(127, 160), *range(0xD800, 0xE000)], "�")
_UNSEEN |= {ord(mark): f"⟨U+{ord(mark):04X}⟩" for mark in _HIDDEN + _TURNING}
_UNSEEN |= {mark: f"⟨U+{mark:04X}⟩" for mark in range(0xE0000, 0xE0080)}  # tags: a text that nobody sees
del _UNSEEN[ord("\n")], _UNSEEN[ord("\t")]


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
    environment.filters["short"] = short
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
    yield Text("program", head(spec.code, CODE), numbered=True)
    if spec.check:
        yield Text("check", head(spec.check, OUTPUT), numbered=True)
    if spec.stdin:
        yield Text("standard input", head(spec.stdin, OUTPUT))
    if sample.case is not None:
        case = spec.cases[sample.case]
        yield Text(f"case {sample.case}: input", head(case.stdin, OUTPUT))
        yield Text(f"case {sample.case}: expected ({case.comparator})", head(case.expected, OUTPUT))


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
