"""Small files that would fill the memory are refused before they are parsed, with file, line and remedy."""

import base64
import gzip
import json
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from evalpool.api.formats import weight
from evalpool.api.formats.shelf import Shelf
from evalpool.schemas import Case, InvalidJob, JobSpec
from tests.conftest import ROOT

SIZE = 56 << 20
MOST = 600
"""MiB that a reader may use, including the interpreter and a row of 64 MiB with its text."""
READER = """
import re, sys
from pathlib import Path
from evalpool.api import formats
from evalpool.schemas import InvalidJob
try:
    with formats.read(sys.argv[1], problems=sys.argv[2] if sys.argv[2:] else None) as data:
        print(sum(1 for _ in data.jobs()))
except InvalidJob as error:
    print(error)
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""
"""It does not use `ru_maxrss`, since a process inherits that peak from its parent."""


def filled(start: bytes, unit: bytes, end: bytes) -> bytes:
    return start + unit * (SIZE // len(unit)) + end


def read(folder: Path, data: bytes, problems: bytes | None = None) -> tuple[str, int]:
    """The message of a separate process that reads a file of samples, and its peak memory in MiB."""
    paths = []
    for name, content in (("samples.gz", data), ("problems.gz", problems)):
        if content is not None:
            (folder / name).write_bytes(gzip.compress(content, 1))
            paths.append(str(folder / name))
    command = [sys.executable, "-c", READER, *paths]
    said, peak = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return said, int(peak)


NESTED = b"[" * 90 + b"]" * 90 + b","
ROWS = {
    "small objects": ((b'{"code": "x", "a": [', b'{"":0},', b"0]}"), ":1: this row would take"),
    "lists in lists": ((b'{"code": "x", "a": [', NESTED, b"0]}"), ":1: this row would take"),
    "strings": ((b'{"code": "x", "args": [', b'"ab",', b'"a"]}'), ":1: this row would take"),
    "over several lines": ((b'{"code": "x",\n"a": [\n', b'{"":0},', b"0]}"), ":1: this row would take"),
    "an array": ((b'[{"code": "x", "a": [', b'{"":0},', b"0]}]"), ": item 1: this item would take"),
}


@pytest.mark.parametrize(("parts", "said"), ROWS.values(), ids=ROWS)
def test_a_row_that_would_fill_the_memory_is_refused_before_it_is_parsed(
    tmp_path: Path, parts: tuple[bytes, bytes, bytes], said: str
) -> None:
    told, peak = read(tmp_path, filled(*parts))
    assert told.startswith(f"{tmp_path}/samples.gz{said} more than 256 MiB of memory")
    assert told.endswith("pass long inputs as strings, or split it")
    assert peak < MOST


def test_json_in_a_string_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    given = filled(b"[", b"{},", b"0]").decode()
    row = {"task_id": 1, "completion": "x", "input_output": given}
    told, peak = read(tmp_path, json.dumps(row).encode())
    assert told.startswith(f'{tmp_path}/samples.gz:1: "input_output" would take more than 256 MiB of memory')
    assert peak < MOST


def test_json_in_a_packed_string_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    packed = base64.b64encode(zlib.compress(pickle.dumps(filled(b"[", b"{},", b"0]").decode()))).decode()
    problem = {"question_id": "a", "public_test_cases": "[]", "private_test_cases": packed, "metadata": "{}"}
    sample = {"question_id": "a", "code": "x"}
    told, peak = read(tmp_path, json.dumps(sample).encode(), json.dumps(problem).encode())
    assert told.startswith(f'{tmp_path}/problems.gz:1: "private_test_cases" would take more than 256 MiB of memory')
    assert peak < MOST


def test_a_row_with_millions_of_wrong_entries_is_refused_for_their_number(tmp_path: Path) -> None:
    told, peak = read(tmp_path, b'{"code": "x", "args": [' + b"0," * 4_000_000 + b"0]}")
    assert told == f"{tmp_path}/samples.gz:1: args: it has 4,000,001 entries; at most 10,000 are allowed"
    assert peak < MOST


def test_a_row_with_a_long_text_full_of_brackets_is_accepted(tmp_path: Path) -> None:
    cases = [{"stdin": '[{"a": [1, 2]}, "\\"]' * 400_000, "expected": "{},[],"} for _ in range(3)]
    told, _ = read(tmp_path, json.dumps({"code": "x", "cases": cases}).encode())
    assert told == "1"


@pytest.mark.parametrize(
    "make",
    [
        lambda many: JobSpec(code="x", args=["a"] * many),
        lambda many: JobSpec(code="x", files={str(n): "" for n in range(many)}),
        lambda many: JobSpec(code="x", cases=[{"expected": ""}] * many),
        lambda many: JobSpec(code="x", cases=[{"expected": "", "args": ["a"] * many}]),
        lambda many: Case("", "", args=["a"] * many),
    ],
)
def test_a_list_or_object_of_a_job_has_at_most_ten_thousand_entries(make: Callable[[int], object]) -> None:
    make(10_000)
    with pytest.raises(InvalidJob, match="10,001 entries; at most 10,000 are allowed"):
        make(10_001)


def test_a_shelf_counts_the_memory_that_its_values_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalpool.api.formats.shelf.MEMORY", 10_000)
    shelf, value = Shelf(), [[[] for _ in range(10)] for _ in range(9)]
    assert len(json.dumps(value)) < 1000 < weight.weight(json.dumps(value).encode()) < 20_000
    first, second = shelf.put(value), shelf.put(value)
    assert first() == second() == value
    assert second() is not second()
