"""Writes results for other programs: CSV, Parquet and JUnit. All of them are streamed, since a batch may be larger than
memory."""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from xml.sax.saxutils import XMLGenerator
from xml.sax.xmlreader import AttributesImpl

from evalpool.schemas.errors import SetupError
from evalpool.schemas.report import Report
from evalpool.schemas.result import Result
from evalpool.schemas.verdict import Verdict

TEXT = 10_000
"""Characters of standard output and of standard error that a row keeps."""
GROUP = 4_000
"""Rows that are written to Parquet at once."""
COLUMNS = {
    "job_id": "string",
    "batch_id": "string",
    "task_id": "string",
    "sample_id": "string",
    "labels": "string",
    "verdict": "string",
    "passed": "bool",
    "cases": "string",
    "cpu_seconds": "double",
    "wall_seconds": "double",
    "queue_seconds": "double",
    "setup_seconds": "double",
    "peak_memory_bytes": "int64",
    "processes_peak": "int64",
    "oom_killed": "bool",
    "exit_code": "int64",
    "signal": "int64",
    "stdout": "string",
    "stdout_truncated": "bool",
    "stderr": "string",
    "stderr_truncated": "bool",
    "detail": "string",
    "comparator": "string",
    "attempt": "int64",
    "worker": "string",
    "sandbox_id": "string",
    "image_digest": "string",
    "deduplicated": "bool",
    "created_at": "timestamp",
    "started_at": "timestamp",
    "finished_at": "timestamp",
}
"""The columns of a table and their types. Labels and the verdicts of the cases are JSON."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_csv(results: Iterable[Result], path: Path) -> None:
    """Write one row per job. An apostrophe is put before text that a spreadsheet would run as a formula."""
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, quoting=csv.QUOTE_ALL)
        table.writeheader()
        for result in results:
            table.writerow({name: _cell(value) for name, value in _row(result).items()})


def write_parquet(results: Iterable[Result], path: Path) -> None:
    """Write the same columns as in CSV, with their types. Times are in UTC. Raises `SetupError` without pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise SetupError("Parquet needs pyarrow, which is not installed: pip install 'evalpool[parquet]'") from None
    types = {"timestamp": pyarrow.timestamp("us", tz="UTC")}
    schema = pyarrow.schema([(name, types.get(kind) or pyarrow.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    rows: Iterator[dict[str, object]] = map(_row, results)
    with parquet.ParquetWriter(path, schema) as file:
        while group := list(islice(rows, GROUP)):
            file.write_table(pyarrow.Table.from_pylist(group, schema))


def write_junit(results: Iterable[Result], path: Path, report: Report) -> None:
    """Write one test case per job, for tools that show test runs. The counts come first in the file, so they are taken
    from the report."""
    errors, skipped = (report.verdicts.get(each, 0) for each in (Verdict.SANDBOX_ERROR, Verdict.CANCELLED))
    suite = {
        "name": report.name or report.batch_id,
        "tests": report.finished,
        "failures": report.finished - report.verdicts.get(Verdict.PASSED, 0) - errors - skipped,
        "errors": errors,
        "skipped": skipped,
        "time": f"{report.seconds:.3f}",
    }
    with path.open("w", encoding="utf-8") as file:
        xml = XMLGenerator(file, "utf-8", short_empty_elements=True)
        xml.startDocument()
        xml.startElement("testsuite", _attributes(**suite))
        for result in results:
            xml.characters("\n")
            _testcase(xml, result, suite["name"])
        xml.characters("\n")
        xml.endElement("testsuite")
        xml.endDocument()


def _row(result: Result) -> dict[str, object]:
    used = result.metrics.model_dump()
    row = {name: used[name] if name in used else getattr(result, name) for name in COLUMNS}
    return row | {
        "task_id": None if result.task_id is None else str(result.task_id),
        "sample_id": None if result.sample_id is None else str(result.sample_id),
        "labels": None if result.labels is None else json.dumps(result.labels),
        "verdict": result.verdict.value,
        "cases": json.dumps([case.verdict for case in result.cases]),
        "stdout": result.stdout[:TEXT],
        "stdout_truncated": result.stdout_truncated or len(result.stdout) > TEXT,
        "stderr": result.stderr[:TEXT],
        "stderr_truncated": result.stderr_truncated or len(result.stderr) > TEXT,
    }


def _cell(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return "'" + value if isinstance(value, str) and value.startswith(_FORMULA) else value


def _testcase(xml: XMLGenerator, result: Result, suite: object) -> None:
    group = suite if result.task_id is None else result.task_id
    name = result.job_id if result.sample_id is None else result.sample_id
    seconds = f"{result.metrics.wall_seconds:.3f}"
    xml.startElement("testcase", _attributes(classname=group, name=name, time=seconds))
    if not result.passed:
        outcome = {Verdict.SANDBOX_ERROR: "error", Verdict.CANCELLED: "skipped"}.get(result.verdict, "failure")
        xml.startElement(outcome, _attributes(message=result.detail, type=result.verdict))
        xml.characters(_text(result.stderr[-TEXT:]))
        xml.endElement(outcome)
    xml.endElement("testcase")


def _attributes(**values: object) -> "AttributesImpl[str]":
    return AttributesImpl({name: _text(value) for name, value in values.items()})


def _text(value: object) -> str:
    """Return the value as text, without the characters that XML does not allow even as entities."""
    return _NOT_XML.sub("", str(value))
