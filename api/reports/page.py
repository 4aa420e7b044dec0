"""`report.html`: one file that needs nothing else, to look at and to send around.

The template escapes all text, and `_visible` replaces the characters that would hide or reorder it, since programs
wrote much of it. The page may use only its own script and style, which its policy names by their hashes.

The results are read once, as a stream: even of a million, only counts and the few samples to show stay in memory."""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evalpool.api.reports import plots
from evalpool.api.reports.overview import OUTPUT, Overview, Sample, head, short
from evalpool.schemas.job import JobSpec
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result
from evalpool.schemas.terminal import UNSEEN
from evalpool.schemas.verdict import Verdict

Programs = Callable[[Sequence[str]], Mapping[str, JobSpec]]

ROWS = 1000
"""Rows that a table of scores has at most: those with the lowest scores."""
CODE = 10_000
"""Characters that are shown of a program."""
PART = 10
"""Programs that are in memory at once. Each may have 32 MiB."""
_TEMPLATES = Path(__file__).parent / "templates"
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Text:
    """One block of text of a failed sample."""

    title: str
    text: str
    numbered: bool = False

    @property
    def lines(self) -> str:
        """The line numbers that stand beside the text."""
        return "\n".join(map(str, range(1, self.text.removesuffix("\n").count("\n") + 2)))


def page(report: Report, results: Callable[[], Iterator[Result]], programs: Programs) -> str:
    """Return the report as a page. `programs` returns the jobs with some ids, as far as they are still stored."""
    overview = Overview(results())
    groups = overview.groups()
    failures = [sample for group in groups for sample in group.samples]
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
        failures=failures,
        groups=groups,
        texts=dict(zip((sample.job_id for sample in failures), _texts(failures, programs), strict=True)),
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
            yield [*_asked(sample, specs.get(sample.job_id)), *_wrote(sample)]


def _asked(sample: Sample, spec: JobSpec | None) -> Iterator[Text]:
    """The program, its input and its expected output."""
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


def _wrote(sample: Sample) -> Iterator[Text]:
    """The output of the program."""
    if sample.case is not None:
        yield Text(f"case {sample.case}: got", sample.stdout)
    elif sample.stdout:
        yield Text("standard output", sample.stdout)
    if sample.stderr:
        yield Text("standard error", sample.stderr)


def _visible(value: object) -> object:
    """Replace control characters, and name the characters that are invisible or change the direction of text."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = _CONTROLS.sub("�", value.replace("\r\n", "\n"))
    return UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)
