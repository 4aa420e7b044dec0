"""The result files for other programs."""

import csv
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from evalpool.api.reports.exports import COLUMNS, TEXT, write_csv, write_junit, write_parquet
from evalpool.schemas import Metrics, Result, Verdict
from evalpool.schemas.errors import SetupError
from evalpool.schemas.report import Report, Spread
from evalpool.schemas.result import CaseResult
from tests.conftest import missing

WHEN = datetime(2026, 11, 16, 12, 30, tzinfo=UTC)
NOTHING = Spread(median=0, p95=0, largest=0)
HOSTILE = "=cmd|' /C calc'!A0"


def result(seq: int = 0, verdict: Verdict = Verdict.PASSED, **fields: object) -> Result:
    """A result of the batch `b`."""
    given = {"detail": f"it was {verdict}", "created_at": WHEN, "finished_at": WHEN} | fields
    return Result(job_id=f"b-{seq:06d}", batch_id="b", verdict=verdict, **given)


def report_of(results: list[Result]) -> Report:
    """A report with the fields that an export reads."""
    verdicts = {each.verdict: sum(one.verdict is each.verdict for one in results) for each in results}
    return Report(
        batch_id="b",
        name="toy & <co>",
        total=len(results),
        finished=len(results),
        verdicts=verdicts,
        tasks=1,
        excluded=0,
        pass_at_k={},
        seconds=2.5,
        cpu_seconds=NOTHING,
        wall_seconds=NOTHING,
        peak_memory_bytes=NOTHING,
    )


@pytest.fixture
def parquet() -> Any:
    """The library that reads Parquet."""
    try:
        from pyarrow import parquet
    except ImportError:
        missing("no pyarrow here")
    return parquet


FULL = result(
    7,
    Verdict.WRONG_ANSWER,
    task_id=7,
    sample_id="s",
    labels={"level": "hard", "n": 2},
    cases=(CaseResult(index=0, verdict=Verdict.PASSED), CaseResult(index=1, verdict=Verdict.WRONG_ANSWER)),
    metrics=Metrics(cpu_seconds=0.25, wall_seconds=0.5, queue_seconds=3.0, peak_memory_bytes=1 << 33, oom_killed=True),
    exit_code=-1,
    stdout="é\n" * TEXT,
    stderr="short",
    stderr_truncated=True,
    comparator="rstrip/1",
    attempt=2,
    started_at=WHEN,
)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_row_has_every_column_and_bounded_text(tmp_path: Path) -> None:
    write_csv([FULL, result()], tmp_path / "r.csv")
    row, bare = read_csv(tmp_path / "r.csv")
    assert list(row) == list(COLUMNS)
    assert (row["job_id"], row["task_id"], row["sample_id"], row["verdict"]) == ("b-000007", "7", "s", "wrong_answer")
    assert json.loads(row["labels"]) == {"level": "hard", "n": 2}
    assert json.loads(row["cases"]) == ["passed", "wrong_answer"]
    assert (row["passed"], row["cpu_seconds"], row["peak_memory_bytes"]) == ("False", "0.25", str(1 << 33))
    assert row["exit_code"] == "-1"  # a number, which no spreadsheet takes for a formula
    assert row["stdout"] == ("é\n" * TEXT)[:TEXT]
    assert (row["stdout_truncated"], row["stderr"], row["stderr_truncated"]) == ("True", "short", "True")
    assert datetime.fromisoformat(row["started_at"]) == WHEN
    assert (bare["task_id"], bare["labels"], bare["started_at"], bare["stdout_truncated"]) == ("", "", "", "False")


@pytest.mark.parametrize("text", [HOSTILE, "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_of_a_csv_is_a_formula(tmp_path: Path, text: str) -> None:
    write_csv([result(stdout=text, stderr=text, detail=text, task_id=text, sample_id=text)], tmp_path / "r.csv")
    (row,) = read_csv(tmp_path / "r.csv")
    for column in ("stdout", "stderr", "detail", "task_id", "sample_id"):
        assert row[column] == "'" + text, column


def test_text_that_only_looks_like_csv_stays_in_its_cell(tmp_path: Path) -> None:
    text = 'a,"b"\r\nc;\n\nd'
    write_csv([result(stdout=text)], tmp_path / "r.csv")
    assert [row["stdout"] for row in read_csv(tmp_path / "r.csv")] == [text]


def test_parquet_keeps_the_types_and_is_written_in_groups(
    parquet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpool.api.reports.exports.GROUP", 2)
    write_parquet([FULL, result(), result(1, stdout=HOSTILE)], tmp_path / "r.parquet")
    file = parquet.ParquetFile(tmp_path / "r.parquet")
    assert file.metadata.num_row_groups == 2
    row, bare, hostile = file.read().to_pylist()
    assert list(row) == list(COLUMNS)
    assert (row["task_id"], row["passed"], row["exit_code"], row["peak_memory_bytes"]) == ("7", False, -1, 1 << 33)
    assert (row["started_at"], row["oom_killed"], row["attempt"]) == (WHEN, True, 2)
    assert (row["stdout"], row["stdout_truncated"]) == (("é\n" * TEXT)[:TEXT], True)
    assert (bare["task_id"], bare["labels"], bare["signal"], bare["started_at"]) == (None, None, None, None)
    assert hostile["stdout"] == HOSTILE  # no spreadsheet reads this


def test_a_batch_without_results_is_an_empty_parquet_table(parquet: Any, tmp_path: Path) -> None:
    write_parquet([], tmp_path / "r.parquet")
    table = parquet.read_table(tmp_path / "r.parquet")
    assert (table.num_rows, table.column_names) == (0, list(COLUMNS))


def test_without_pyarrow_the_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SetupError, match=r"pip install 'evalpool\[parquet\]'"):
        write_parquet([], tmp_path / "r.parquet")


def test_junit_distinguishes_failures_errors_and_skipped_tests(tmp_path: Path) -> None:
    results = [
        result(0, task_id="t/1", sample_id=0, metrics=Metrics(wall_seconds=0.5)),
        result(1, Verdict.WRONG_ANSWER, task_id="t/1", sample_id=1, detail='"<&>" is wrong', stderr="]]> <b>&"),
        result(2, Verdict.TIME_LIMIT),
        result(3, Verdict.SANDBOX_ERROR),
        result(4, Verdict.CANCELLED),
    ]
    write_junit(results, tmp_path / "r.xml", report_of(results))
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert suite.attrib == {
        "name": "toy & <co>",
        "tests": "5",
        "failures": "2",
        "errors": "1",
        "skipped": "1",
        "time": "2.500",
    }
    cases = suite.findall("testcase")
    assert [[child.tag for child in case] for case in cases] == [[], ["failure"], ["failure"], ["error"], ["skipped"]]
    assert cases[0].attrib == {"classname": "t/1", "name": "0", "time": "0.500"}
    assert (cases[2].attrib["classname"], cases[2].attrib["name"]) == ("toy & <co>", "b-000002")
    failure = cases[1][0]
    assert failure.attrib == {"message": '"<&>" is wrong', "type": "wrong_answer"}
    assert failure.text == "]]> <b>&"


def test_junit_leaves_out_characters_that_xml_does_not_allow(tmp_path: Path) -> None:
    odd = "a\x00\x08\x1b\ufffe\uffffb\n\t😀"
    results = [result(0, Verdict.RUNTIME_ERROR, detail=odd, stderr=odd, task_id=odd)]
    write_junit(results, tmp_path / "r.xml", report_of(results))
    case = ElementTree.parse(tmp_path / "r.xml").getroot()[0]
    assert case.attrib["classname"] == case[0].attrib["message"] == case[0].text == "ab\n\t😀"


@pytest.mark.usefixtures("parquet")
def test_exports_keep_at_most_one_group_of_results_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalpool.api.reports.exports.GROUP", 3)
    alive: set[int] = set()
    most = 0

    class Counted(Result):
        def __del__(self) -> None:
            alive.discard(id(self))

    def stream() -> Iterator[Result]:
        nonlocal most
        for seq in range(20):
            one = Counted.model_construct(**dict(result(seq)))
            alive.add(id(one))
            most = max(most, len(alive))
            yield one

    write_csv(stream(), tmp_path / "r.csv")
    write_parquet(stream(), tmp_path / "r.parquet")
    write_junit(stream(), tmp_path / "r.xml", report_of([result()]))
    assert most <= 4
