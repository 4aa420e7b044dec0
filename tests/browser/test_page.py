"""The report page in a browser: it fetches nothing, logs no errors, and fits its window."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evalpool.api.reports.page import page as render
from evalpool.schemas import JobSpec, Metrics, Verdict
from evalpool.schemas.job import Case
from evalpool.schemas.report import Score
from evalpool.schemas.result import CaseResult
from tests.api.test_page import HOSTILE, report, result

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS = (1280, 400)
LONG = "x" * 500
"""A long name without a place where a line may break."""
FAILED = [verdict for verdict in Verdict if verdict not in (Verdict.PASSED, Verdict.CANCELLED)]


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page with all its parts, and with names and programs that try to break it."""
    results = [
        result(
            seq,
            verdict,
            task_id=HOSTILE if seq % 7 == 1 else LONG if seq % 7 == 2 else f"task/{seq % 5}",
            sample_id=seq,
            detail=LONG if seq % 3 else "one sentence",
            stdout=HOSTILE,
            stderr=LONG * 20,
            cases=(CaseResult(index=0, verdict=verdict),),
            metrics=Metrics(cpu_seconds=0.01 * (1 + seq % 50), peak_memory_bytes=(8 + seq) << 20),
        )
        for seq, verdict in enumerate([*Verdict] * 5)
    ]
    spec = JobSpec(code=f"print('{HOSTILE}')\n# {LONG}\n" * 20, cases=(Case(HOSTILE, LONG),))
    tasks = {str(each.task_id): Score(scored=4, passed=1, excluded=1) for each in results}
    summed = report(
        *results,
        name=LONG,
        total=60,
        pass_at_k={1: 0.5, 10: 0.75, 100: 1.0},
        intervals={1: (0.4, 0.6), 10: (0.6, 0.9), 100: (1.0, 1.0)},
        problems=164,
        samples_per_task=(3, 5),
        by_task=tasks,
        by_label={"level": tasks, LONG: tasks},
        near_limit=3,
        rerun=2,
        repeats=2,
        flaky=tuple(each.job_id for each in results),
        deduplicated=5,
        cached=1,
        made={"limits": {"cpu_seconds": 5}, "images": [{"name": LONG, "digest": LONG}], LONG: {LONG: {LONG: None}}},
    )
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(summed, lambda: iter(results), lambda ids: dict.fromkeys(ids, spec)), encoding="utf-8")
    return path


@pytest.fixture
def visit(browser: Browser, file: Path) -> Iterator[Callable[..., Page]]:
    """Open the page. Any error on its console, and any request, fails the test."""
    wrong: list[str] = []

    def _visit(width: int = 1280, fragment: str = "", **options: Any) -> Page:
        tab = browser.new_page(viewport={"width": width, "height": 800}, **options)
        tab.on("console", lambda message: wrong.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        tab.on("request", lambda request: wrong.append(f"request: {request.url}"))
        tab.goto(file.as_uri() + fragment)
        own = f"request: {file.as_uri()}"
        assert wrong.count(own) == 1
        wrong.remove(own)
        return tab

    yield _visit
    for context in browser.contexts:
        context.close()
    assert not wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_its_window_with_every_failure_open(visit: Callable[..., Page], width: int, scheme: str) -> None:
    tab = visit(width, color_scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.evaluate("document.querySelectorAll('details').forEach((failure) => { failure.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("details pre").first.is_visible()


def test_the_policy_allows_the_style_and_script_of_the_page(visit: Callable[..., Page]) -> None:
    tab = visit()
    assert tab.locator("#filter").is_visible()
    assert tab.locator(".value").first.evaluate("(value) => getComputedStyle(value).fontSize") == "56px"
    assert tab.locator("script").count() == 1


def test_the_policy_stops_any_other_script_and_any_request(browser: Browser, file: Path, tmp_path: Path) -> None:
    """The policy holds even if the escaping were broken."""
    broken = tmp_path / "broken.html"
    attack = (
        "<script>document.title = 'owned'</script><img src='http://127.0.0.1:9/' onerror=\"document.title = 'owned'\">"
    )
    broken.write_text(file.read_text("utf-8").replace("<main>", f"<main>{attack}"), encoding="utf-8")
    tab = browser.new_page()
    refused: list[str] = []
    tab.on("console", lambda message: refused.append(message.text))
    tab.goto(broken.as_uri())
    assert tab.title() != "owned"
    assert len([text for text in refused if "Content Security Policy" in text]) >= 2
    tab.close()


def test_failures_are_filtered_by_verdict_and_by_text(visit: Callable[..., Page]) -> None:
    tab = visit()
    shown = tab.locator("#failures details:visible")
    assert shown.count() == 5 * len(FAILED)
    tab.get_by_role("button", name=re.compile("time_limit")).click()
    assert shown.count() == 5
    tab.get_by_role("button", name=re.compile("memory_limit")).click()
    assert shown.count() == 10
    tab.get_by_role("searchbox").fill("ONE sentence")
    assert 0 < shown.count() < 10
    assert tab.locator("#filter output").inner_text() == f"{shown.count()} of {5 * len(FAILED)} shown"
    tab.get_by_role("searchbox").fill("nowhere to be found")
    assert shown.count() == 0


def test_a_link_opens_the_failure_it_leads_to(visit: Callable[..., Page]) -> None:
    tab = visit()
    link = tab.locator("td a").first
    target = tab.locator(f"{link.get_attribute('href')}")
    assert not target.evaluate("(failure) => failure.open")
    link.click()
    assert target.evaluate("(failure) => failure.open")
    assert target.locator("summary").is_visible()
    assert visit(fragment="#f3").locator("#f3").evaluate("(failure) => failure.open")


def test_without_script_the_page_shows_everything_but_the_filter(visit: Callable[..., Page]) -> None:
    tab = visit(java_script_enabled=False)
    assert not tab.locator("#filter").is_visible()
    assert tab.locator("#failures details:visible").count() == 5 * len(FAILED)
    tab.locator("summary").first.click()
    assert tab.locator("details pre").first.is_visible()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_column_of_a_table_is_visible(visit: Callable[..., Page], width: int) -> None:
    tab = visit(width)
    lost = """(tables) => tables.flatMap((table) => {
        const frame = (table.closest(".scroll") ?? table.parentElement).getBoundingClientRect();
        return [...table.querySelectorAll("tbody td")].filter((cell) => {
            const { left, right, width } = cell.getBoundingClientRect();
            const cut = cell.scrollWidth > cell.clientWidth;
            return cut || width === 0 || left < frame.left - 1 || right > frame.right + 1;
        }).map((cell) => cell.outerHTML);
    })"""
    assert tab.locator("table").count() >= 5
    assert tab.locator("table").evaluate_all(lost) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_of_a_table_has_its_name_beside_or_above_it(visit: Callable[..., Page], width: int) -> None:
    tab = visit(width)
    heads = tab.locator(".slowest th")
    named = """(cells) => cells.map((cell) => getComputedStyle(cell, "::before").content)"""
    beside = tab.locator(".slowest tbody tr").first.locator("td.number").evaluate_all(named)
    if heads.first.is_visible():
        assert heads.all_inner_texts() == ["task", "sample", "verdict", "wall s", "CPU s", "peak MiB"]
    else:
        assert beside == ['"wall s"', '"CPU s"', '"peak MiB"']


def test_identical_errors_stand_together_under_their_number(visit: Callable[..., Page]) -> None:
    tab = visit()
    group = tab.locator("#failures .group").first
    assert re.match(r"\d+ samples", group.locator("h3").first.inner_text())
    verdicts = group.locator("details").evaluate_all("(all) => all.map((each) => each.dataset.verdict)")
    assert len(verdicts) > 1
    assert len(set(verdicts)) == 1
    tab.get_by_role("searchbox").fill("nowhere to be found")
    assert not group.is_visible()
