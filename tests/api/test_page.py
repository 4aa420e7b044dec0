"""The report page: what it shows, and that no program can change its behaviour."""

import base64
import hashlib
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
from markupsafe import escape

from evalpool.api.reports.overview import FAILURES
from evalpool.api.reports.page import CODE, ROWS, page
from evalpool.api.reports.plots import MEBIBYTES, SECONDS, Histogram, curve
from evalpool.schemas import JobSpec, Metrics, Result, Verdict
from evalpool.schemas.job import Case
from evalpool.schemas.report import Report, Score, Spread
from evalpool.schemas.result import CaseResult

WHEN = datetime(2026, 11, 16, 12, 30, tzinfo=UTC)
NOTHING = Spread(median=0, p95=0, largest=0)
VOID = {"meta", "link", "input", "br"}
HOSTILE = "</script><script>alert(1)</script><!-- ]]> {{ 7*7 }} \"'><img src=x onerror=alert(1)></pre></details>"


def result(seq: int = 0, verdict: Verdict = Verdict.WRONG_ANSWER, **fields: object) -> Result:
    """A result of the batch `b`."""
    given = {"detail": f"it was {verdict}", "created_at": WHEN, "finished_at": WHEN} | fields
    return Result(job_id=f"b-{seq:06d}", batch_id="b", verdict=verdict, **given)


def report(*results: Result, **fields: object) -> Report:
    """A report with the fields that the page needs."""
    verdicts = Counter(each.verdict for each in results)
    given: dict[str, object] = {
        "batch_id": "b",
        "name": "toy",
        "total": len(results),
        "finished": len(results),
        "verdicts": verdicts,
        "tasks": 1,
        "excluded": sum(not each.verdict.scored for each in results),
        "pass_at_k": {},
        "seconds": 2.0,
        "cpu_seconds": NOTHING,
        "wall_seconds": NOTHING,
        "peak_memory_bytes": NOTHING,
    }
    return Report.model_validate(given | fields)


def shown(*results: Result, spec: JobSpec | None = None, **fields: object) -> "Document":
    """The page of these results, all of which come from the same program."""
    programs = {each.job_id: spec for each in results if spec is not None}
    return Document(
        page(
            report(*results, **fields),
            lambda: iter(results),
            lambda ids: {i: programs[i] for i in ids if i in programs},
        )
    )


class Document(HTMLParser):
    """A page as a browser reads it. Its tags must match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> ends nothing"
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def handle_comment(self, data: str) -> None:
        pytest.fail(f"a comment: {data[:60]}")

    def text(self, *tags: str) -> str:
        """Return the text of all elements, or of some."""
        return " ".join("".join(text for tag, text in self.texts if not tags or tag in tags).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def policy(document: Document) -> str:
    (content,) = (
        each["content"] for each in document.all("meta") if each.get("http-equiv") == "Content-Security-Policy"
    )
    assert content is not None
    return content


# -- what no program can do --------------------------------------------------------------------------------------------


def test_all_text_from_outside_is_escaped() -> None:
    case = CaseResult(index=0, verdict=Verdict.WRONG_ANSWER)
    hostile = result(task_id=HOSTILE, sample_id=HOSTILE, detail=HOSTILE, stdout=HOSTILE, stderr=HOSTILE, cases=(case,))
    document = shown(
        hostile,
        spec=JobSpec(code=HOSTILE, cases=(Case(HOSTILE, HOSTILE),)),
        name=HOSTILE,
        by_task={HOSTILE: Score(scored=1)},
        by_label={HOSTILE: {HOSTILE: Score(scored=1)}},
        flaky=(HOSTILE,),
        made={HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]},
    )
    assert len(document.all("script")) == 1
    assert not document.all("img")
    assert not [attributes for _, attributes in document.elements if any(name.startswith("on") for name in attributes)]
    assert document.text("pre").count(HOSTILE) == 5  # program, input, expected, got, standard error
    assert document.html.count("alert(1)") == 2 * document.html.count(escape(HOSTILE))


def test_checks_and_outputs_are_escaped_too() -> None:
    document = shown(result(stdout=HOSTILE, stderr=HOSTILE), spec=JobSpec(code="x", check=HOSTILE, stdin=HOSTILE))
    assert len(document.all("script")) == 1
    assert document.text("pre").count(HOSTILE) == 4


def test_only_its_own_script_and_style_may_run_and_nothing_is_fetched() -> None:
    document = shown(result(), pass_at_k={1: 0.5, 2: 0.7}, intervals={1: (0.3, 0.6)}, by_task={"a": Score(scored=1)})
    rules = dict(rule.strip().split(" ", 1) for rule in policy(document).split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy(document)
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", document.html, re.DOTALL)
        assert rules[kind] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert not [attributes for _, attributes in document.elements if "style" in attributes]  # the policy forbids them
    targets = [
        value for _, each in document.elements for name, value in each.items() if name in ("src", "href", "action")
    ]
    assert all(target is not None and target.startswith(("#", "data:")) for target in targets)
    assert "url(" not in document.html
    assert "@import" not in document.html


def test_characters_that_hide_or_reorder_text_are_made_visible() -> None:
    odd = "a\x00b\x1b[31mc\x7f\x85d\u202ee\u2066f\u2028g\r\nh\ti\rj"
    code = "x = 1  # \u202e } if admin"
    html = shown(result(detail=odd, task_id=odd, stderr=odd), spec=JobSpec(code=code), name="n\u202e").html
    assert html.count("a�b�[31mc��d⟨U+202E⟩e⟨U+2066⟩f⟨U+2028⟩g\nh\ti�j") == 5
    assert "x = 1  # ⟨U+202E⟩ } if admin" in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]", html)


def test_a_lone_surrogate_does_not_break_the_file() -> None:
    broken = result().model_copy(update={"detail": "a\ud800b", "task_id": "\udfff", "stderr": "\ud800"})
    html = shown(broken).html
    assert "a�b" in html
    html.encode("utf-8")


def test_huge_texts_are_cut() -> None:
    huge = "x" * (10 << 20)
    case = CaseResult(index=0, verdict=Verdict.WRONG_ANSWER)
    document = shown(
        result(task_id=huge, sample_id=huge, detail=huge, stdout=huge, stderr=huge, cases=(case,)),
        spec=JobSpec(code=huge, cases=(Case(huge, huge),)),
        name=huge,
        by_task={huge: Score(scored=1)},
    )
    assert len(document.html) < 100_000
    assert f"{(10 << 20) - CODE:,} more characters" in document.text("pre")


# -- a million results -------------------------------------------------------------------------------------------------


def stream(count: int, said: int = 0) -> Iterator[Result]:
    """Results, each slower and larger than the one before, with so many characters of output."""
    one, verdicts = result(), (Verdict.PASSED, Verdict.WRONG_ANSWER, Verdict.TIME_LIMIT)
    for seq in range(count):
        used = one.metrics.model_copy(update={"cpu_seconds": seq / count, "peak_memory_bytes": seq << 10})
        said_now = {"stdout": f"{seq}" + "x" * said, "stderr": f"{seq}" + "y" * said}
        given = {"job_id": f"b-{seq:06d}", "task_id": seq, "verdict": verdicts[seq % 3], "metrics": used}
        yield one.model_copy(update=given | said_now)


def programs(job_ids: Sequence[str]) -> Mapping[str, JobSpec]:
    """Return large programs, of which only a few are asked for at a time."""
    assert len(job_ids) <= 10  # each may have 32 MiB
    return {job_id: JobSpec(code="z" * 2 * CODE) for job_id in job_ids}


def test_large_batches_are_read_once_into_a_bounded_page() -> None:
    read = 0

    def results() -> Iterator[Result]:
        nonlocal read
        for each in stream(50_000):
            read += 1
            yield each

    document = Document(page(report(total=50_000, finished=50_000), results, programs))
    assert read == 50_000
    assert len(document.html) < 5_000_000
    assert len(document.all("details")) == FAILURES


def test_the_output_of_programs_is_not_kept_in_memory() -> None:
    tracemalloc.start()
    page(report(total=3_000, finished=3_000), lambda: stream(3_000, said=50_000), programs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000  # they wrote 300 MB


def test_the_failures_shown_are_spread_over_verdicts_and_tasks() -> None:
    rare = [result(90_000 + n, Verdict.MEMORY_LIMIT, task_id="rare", sample_id=f"rare{n}") for n in range(3)]
    many = [result(1000 * task + n, task_id=f"t{task}", sample_id=n) for task in range(5) for n in range(500)]
    document = shown(*many, *rare)
    chosen = Counter(re.findall(r"<b>(\w+)</b>", document.html.partition("<details")[2]))
    assert chosen["rare"] == 3
    assert chosen.total() == FAILURES
    assert {chosen[f"t{task}"] for task in range(5)} <= {59, 60}
    assert "300 of 2,503 failures, spread over verdicts and problems" in document.text()


def test_long_tables_are_cut_and_say_so() -> None:
    tasks = {f"task{n}": Score(scored=1, passed=n % 2) for n in range(ROWS + 50)}
    document = shown(result(), by_task=tasks)
    assert f"The {ROWS:,} problems with the lowest rates, of {ROWS + 50:,}" in document.text()
    assert document.text("td").count("task") == ROWS


# -- what it shows -----------------------------------------------------------------------------------------------------


def test_the_page_shows_scores_coverage_and_settings() -> None:
    document = shown(
        *(result(seq) for seq in range(190)),
        pass_at_k={1: 0.78421, 10: 0.9},
        intervals={1: (0.71, 0.841), 10: (0.8, 0.95)},
        tasks=19,
        problems=164,
        samples_per_task=(10, 10),
        made={"limits": {"cpu_seconds": 5}, "comparators": ["rstrip/1"], "dataset": None},
    )
    text = document.text()
    for expected in (
        "toy batch b · 2026-11-16 12:30 UTC",
        "pass@1 0.7842 78.4%",
        "95 % interval 71.0 – 84.1 %",
        "19/164 problems, 190 samples, 10 per problem",
        "pass@1 78.4%, pass@10 90.0%",
        "limits cpu_seconds 5",
        "rstrip/1",
    ):
        assert expected in text
    assert not [each for each in document.all("div") if "banner" in (each.get("class") or "")]


def test_the_page_says_what_is_missing_or_doubtful() -> None:
    results = [result(0, Verdict.PASSED), result(1), result(2, Verdict.SANDBOX_ERROR), result(3, Verdict.CANCELLED)]
    document = shown(
        *results, total=9, near_limit=1, rerun=2, repeats=3, flaky=("b-000000", "b-000001"), deduplicated=4, cached=3,
        warnings=("37 of 40 samples failed because module <b>pandas</b> is missing.",),
    )  # fmt: skip
    text = document.text()
    for expected in (
        "2 samples excluded from every score. 1 sandbox_error: evalpool itself failed, after all retries. 1 cancelled",
        "Incomplete: 4 of 9 samples have a result.",
        "1 verdict close to a limit.",
        "2 samples run again",
        "37 of 40 samples failed because module <b>pandas</b> is missing.",
        "2 samples flaky:",
        "each run 3 times; 4 share the result of an identical one, 3 of them from an earlier batch; 2 excluded",
    ):
        assert expected in text
    loud = [each for each in document.all("div") if each.get("class") == "banner loud"]
    assert len(loud) == 3
    assert {each["data-verdict"] for each in document.all("details")} == {"wrong_answer", "sandbox_error"}


def test_a_failure_shows_its_program_and_its_case() -> None:
    cases = tuple(CaseResult(index=n, verdict=v) for n, v in enumerate([Verdict.PASSED, Verdict.WRONG_ANSWER]))
    spec = JobSpec(code="\nprint(6)\n", cases=(Case("no", "no"), Case("the input", "seven")))
    document = shown(result(task_id="sum", sample_id=4, cases=cases, stdout="six", stderr="warned"), spec=spec)
    assert document.text("h3") == "programcase 1: inputcase 1: expected (rstrip)case 1: gotstandard error"
    for expected in ("print(6)", "the input", "seven", "six", "warned"):
        assert expected in document.text("pre")
    assert '<pre class="lines" aria-hidden="true">1\n2</pre><pre>\n\nprint(6)\n</pre>' in document.html
    assert "no " not in document.text("pre")


def test_the_page_says_that_a_program_wrote_nothing() -> None:
    failed = result(cases=(CaseResult(index=0, verdict=Verdict.WRONG_ANSWER),))
    html = shown(failed, spec=JobSpec(code="pass", cases=(Case("", "seven"),))).html
    assert re.search(r"<h3>case 0: got</h3>\s*<p class=\"quiet\">empty</p>", html)


def test_a_failure_without_program_and_output_is_shown_too() -> None:
    assert "its code is no longer stored" in shown(result()).text()


def test_the_slowest_and_largest_samples_link_to_their_failures() -> None:
    used = [Metrics(cpu_seconds=n, peak_memory_bytes=(20 - n) << 20) for n in range(20)]
    results = [
        result(n, Verdict.PASSED if n % 2 else Verdict.TIME_LIMIT, sample_id=f"s{n}", metrics=each)
        for n, each in enumerate(used)
    ]
    document = shown(*results)
    slowest, hungriest = re.findall(r"<h2>(?:Slowest|Most memory)</h2>(.*?)</table>", document.html, re.DOTALL)
    assert re.findall(r"s\d+", re.sub("<[^>]+>", "", slowest)) == [f"s{n}" for n in range(19, 9, -1)]
    assert re.findall(r"s\d+", re.sub("<[^>]+>", "", hungriest)) == [f"s{n}" for n in range(10)]
    anchors = {each["id"] for each in document.all("details")}
    links = [each["href"] for each in document.all("a")]
    assert len(links) == 10
    assert {str(link)[1:] for link in links} <= anchors


def test_wall_time_counts_for_the_slowest_samples() -> None:
    used = [Metrics(cpu_seconds=n, wall_seconds=n) for n in range(10)] + [Metrics(cpu_seconds=0.25, wall_seconds=60)]
    document = shown(*(result(n, sample_id=f"s{n}", metrics=each) for n, each in enumerate(used)))
    (slowest,) = re.findall(r"<h2>Slowest</h2>(.*?)</table>", document.html, re.DOTALL)
    assert re.findall(r"s\d+", re.sub("<[^>]+>", "", slowest))[:2] == ["s10", "s9"]
    assert "60.000" in slowest
    assert "0.250" in slowest


def test_identical_errors_are_grouped_and_all_of_them_counted() -> None:
    words = "exit code 1: NameError: name 'x' is not defined"
    alike = [
        result(n, Verdict.RUNTIME_ERROR, sample_id=f"s{n}", detail=f"{n} of 2000 cases passed; case {n}: {words}")
        for n in range(1000)
    ]
    document = shown(result(2000, detail="on its own", sample_id="alone"), *alike)
    groups = [each for each in document.all("section") if each.get("class") == "group"]
    assert len(groups) == 1
    assert f"1,000 samples, {FAILURES - 1} of them here: runtime_error {words}" in document.text()
    assert document.html.index("1,000 samples") < document.html.index("on its own")


def test_tasks_and_labels_are_listed_by_rate() -> None:
    document = shown(
        result(task_id="hard"),
        by_task={"easy": Score(scored=2, passed=2), "hard": Score(scored=4, passed=1, excluded=3), "none": Score()},
        by_label={"level": {"low": Score(scored=1_000, passed=250)}},
    )
    problems = document.html.partition("<h2>Problems</h2>")[2].partition("</table>")[0]
    assert re.findall(r">(easy|hard|none)<", problems) == ["none", "hard", "easy"]
    assert "low 250 / 1,000 25.0 %" in document.text()
    assert "hard 1 / 4 25.0 % 3" in document.text()


def test_a_batch_without_results_has_a_page_too() -> None:
    text = shown(total=3).text()
    assert "No problem has enough scored samples yet" in text
    assert "Incomplete: 0 of 3" in text


def test_without_script_the_filter_is_not_there() -> None:
    (box,) = [each for each in shown(result()).all("div") if each.get("id") == "filter"]
    assert "hidden" in box


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "values", "labels"),
    [
        (SECONDS, [0.0, 0.003, 0.011], ["1 ms", "2 ms", "5 ms", "10 ms"]),
        (SECONDS, [0.02, 300.0], ["20 ms", "200 ms", "2 s", "20 s", "200 s"]),
        (MEBIBYTES, [9, 600.0], ["8 MiB", "32 MiB", "128 MiB", "512 MiB"]),
        (MEBIBYTES, [1, 1 << 20], ["1 MiB", "32 MiB", "1 GiB", "32 GiB", "1,024 GiB"]),
    ],
)
def test_a_histogram_is_marked_in_its_unit(marks: Mapping[float, str], values: list[float], labels: list[str]) -> None:
    histogram = Histogram("it", marks)
    for value in values:
        histogram.add(value, passed=value == values[0])
    assert re.findall(r'class="x"[^>]*>([^<]*)<', histogram.svg()) == [*labels, "it, logarithmic"]


def test_a_histogram_stacks_failed_samples_on_passed_ones() -> None:
    histogram = Histogram("it", SECONDS)
    for passed in (True, True, True, False):
        histogram.add(1.0, passed=passed)
    assert "3 passed, 1 failed" in histogram.svg()
    heights = re.findall(r'<rect class="(\w+)"[^>]*y="([\d.]+)" height="([\d.]+)"', histogram.svg())
    assert heights == [("passed", "42.5", "127.5"), ("failed", "0.0", "42.5")]
    for share in re.findall(r'(?:x|width)="([\d.-]+)%"', histogram.svg()):
        assert 0 <= float(share) <= 100


def test_a_curve_has_a_point_and_an_interval_for_each_k() -> None:
    svg = curve({1: 0.2, 10: 0.5, 100: 1.0}, {1: (0.1, 0.3), 10: (0.4, 0.6), 100: (1.0, 1.0)})
    assert re.findall(r'<circle cx="([\d.]+)%" cy="([\d.]+)"', svg) == [
        ("8.00", "136.0"),
        ("50.00", "85.0"),
        ("92.00", "0.0"),
    ]
    assert svg.count('class="interval"') == 3
