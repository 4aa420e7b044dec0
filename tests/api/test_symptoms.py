"""Warnings of a report when the setup seems to be at fault, and not the programs."""

import io
import json
import time

import pytest
from rich.console import Console

from evalpool.api import BatchHandle
from evalpool.api.cli import main
from evalpool.api.reports import summary
from evalpool.api.reports.symptoms import Symptoms
from evalpool.schemas import JobSpec, Verdict
from evalpool.schemas.store import Store
from tests.api.conftest import record

IMAGE = "house/pandas:1 sha256:0123456789abcdef"
PANDAS = "exit code 1: ModuleNotFoundError: No module named 'pandas'"


def shown(store: Store, *results: tuple[int, Verdict, str, int | None]) -> str:
    """The notes below the report of a batch with so many results of each kind, as one line."""
    total = sum(count for count, *_ in results)
    store.add_batch("b", [JobSpec(code=f"{n}") for n in range(total)], None, None, images=[IMAGE] * total)
    seq = 0
    for count, verdict, detail, exit_code in results:
        record(store, [f"b-{n:06}" for n in range(seq, seq + count)], verdict, detail=detail, exit_code=exit_code)
        seq += count
    text = io.StringIO()
    Console(file=text, width=2000).print(summary.render(BatchHandle("b").report()))
    return text.getvalue()


def test_a_module_that_the_image_lacks_is_reported(store: Store) -> None:
    said = shown(store, (37, Verdict.RUNTIME_ERROR, PANDAS, 1), (3, Verdict.PASSED, "passed", 0))
    named = "the image house/pandas:1 (sha256:0123456789ab…)"
    assert f"37 of 40 samples failed because the module pandas is missing from {named}." in said
    assert "the same error" not in said


@pytest.mark.parametrize(
    ("detail", "exit_code", "thing"),
    [
        ("0 of 3 cases passed; case 0: exit code 1: ModuleNotFoundError: No module named 'a.b'", 1, "module a.b"),
        ("exit code 127: bash: line 1: jq: command not found", 127, "command jq"),
        ("exit code 127: main.sh: 1: jq: not found", 127, "command jq"),
        ("exit code 1: Error: Cannot find module 'lodash'", 1, "module lodash"),
        ("exit code 1: Error in library(dplyr) : there is no package called ‘dplyr’", 1, "package dplyr"),
    ],
)
def test_missing_modules_of_every_language_are_named(store: Store, detail: str, exit_code: int, thing: str) -> None:
    said = shown(store, (2, Verdict.RUNTIME_ERROR, detail, exit_code), (2, Verdict.WRONG_ANSWER, "no", 0))
    assert f"2 of 4 samples failed because the {thing} is missing" in said


def test_a_missing_header_is_a_compile_error_that_is_reported(store: Store) -> None:
    words = "main.cpp:1:10: fatal error: boost/any.hpp: No such file or directory"
    said = shown(store, (5, Verdict.COMPILE_ERROR, words, 1))
    assert "5 of 5 samples failed because the header boost/any.hpp is missing" in said


def test_an_error_that_nearly_all_samples_share_is_reported(store: Store) -> None:
    words = "exit code 1: NameError: name 'List' is not defined"
    said = shown(store, (9, Verdict.RUNTIME_ERROR, words, 1), (1, Verdict.PASSED, "passed", 0))
    assert f"9 of 10 samples failed with the same error, perhaps because of the setup: {words}" in said


@pytest.mark.parametrize(
    ("verdict", "limit"),
    [(Verdict.TIME_LIMIT, "time"), (Verdict.MEMORY_LIMIT, "memory"), (Verdict.OUTPUT_LIMIT, "output")],
)
def test_a_limit_that_nearly_all_samples_reach_is_reported(store: Store, verdict: Verdict, limit: str) -> None:
    assert f"4 of 5 samples reached their {limit} limit, which may be too low." in shown(
        store, (4, verdict, "so and so", None), (1, Verdict.PASSED, "passed", 0)
    )


def test_the_reason_for_our_own_failures_is_reported(store: Store) -> None:
    said = shown(store, (2, Verdict.SANDBOX_ERROR, "no space left", None), (1, Verdict.SANDBOX_ERROR, "else", None))
    assert "3 jobs could not be evaluated (sandbox_error). The most frequent reason: no space left" in said


@pytest.mark.redis
def test_warnings_are_given_beside_json_too(store: Store, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown(store, (3, Verdict.RUNTIME_ERROR, PANDAS, 1))
    with pytest.raises(SystemExit) as ended:
        main(["report", "b", "--json"])
    assert not ended.value.code
    out, err = capsys.readouterr()
    (warning,) = json.loads(out)["warnings"]
    assert warning.startswith("3 of 3 samples failed because the module pandas is missing from the image house/pandas")
    assert err.splitlines() == [warning]


def test_only_the_beginning_of_a_hostile_error_is_read() -> None:
    times = []
    for size in (1 << 20, 16 << 20):
        signs, detail = Symptoms(), "1" * size
        began = time.process_time()
        for _ in range(50):
            signs.add(Verdict.RUNTIME_ERROR, 127, detail, IMAGE)
            signs.add(Verdict.RUNTIME_ERROR, 127, ": not found" * (size // 11), IMAGE)
        times.append(time.process_time() - began)
    assert times[1] < 100 * times[0] + 1  # it is sixteen times as long to make, but no longer to read


def test_ordinary_failures_give_no_warning(store: Store) -> None:
    said = shown(
        store,
        (50, Verdict.WRONG_ANSWER, "the output differs", 0),
        (1, Verdict.RUNTIME_ERROR, PANDAS, 1),
        (20, Verdict.RUNTIME_ERROR, "exit code 1: NameError: name 'x' is not defined", 1),
        (10, Verdict.TIME_LIMIT, "used 5 s", None),
        (1, Verdict.RUNTIME_ERROR, "exit code 127", 127),
    )
    assert "samples failed" not in said
    assert "reached" not in said
