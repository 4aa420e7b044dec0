"""Files of rows in every layout are read a row at a time, and hostile files are refused."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from evalpool.api.formats.lines import Lines
from evalpool.api.formats.shelf import Problems, Shelf
from evalpool.schemas import InvalidJob


def read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(row.place, row.fields) for row in Lines(path.name, path)]


SHAPES = {
    "lines": ('{"a": 1}\n\n{"a": 2}\n', ["f:1", "f:3"]),
    "array": ('[{"a": 1}, {"a": 2}]', ["f: item 1", "f: item 2"]),
    "array over several lines": ('\n [\n  {\n    "a": 1\n  },\n  {"a": 2}\n]\n', ["f: item 1", "f: item 2"]),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(("text", "places"), SHAPES.values(), ids=SHAPES)
def test_the_layout_of_a_file_is_recognised_by_its_content(
    tmp_path: Path, text: str, places: list[str], mark: bytes, packed: bool
) -> None:
    data = mark + text.lstrip().encode() if mark else text.encode()
    (tmp_path / "f").write_bytes(gzip.compress(data) if packed else data)
    assert read(tmp_path / "f") == [(place, {"a": n}) for n, place in enumerate(places, 1)]


@pytest.mark.parametrize("indent", [None, 2])
def test_one_object_is_one_row_however_it_is_laid_out(tmp_path: Path, indent: int | None) -> None:
    value = {"a": {"b": [1, 2.5, None]}, "c": "x\ny"}
    (tmp_path / "f").write_text(json.dumps(value, indent=indent))
    assert read(tmp_path / "f") == [("f:1", value)]


def test_lists_of_strings_are_generations_with_their_index(tmp_path: Path) -> None:
    (tmp_path / "f").write_text('[["a", "b"], []]')
    assert [fields for _, fields in read(tmp_path / "f")] == [
        {"generations": ["a", "b"], "index": 0},
        {"generations": [], "index": 1},
    ]


WRONG = [
    (b"[1]", "f: item 1: each item must be an object or a list of strings"),
    (b'[{"a": 1}, null]', "f: item 2: each item must be an object or a list of strings"),
    (b'[["a", 1]]', "f: item 1: each item must be an object or a list of strings"),
    (b'[{"a": 1}, {"a"', "f: item 2: not valid JSON (parse error: premature EOF)"),
    (b'[{"a": 1}] x', "f: item 2: not valid JSON (parse error: trailing garbage)"),
    (b'[{"a": "\xff"}]', "f: item 1: not valid JSON (lexical error: invalid bytes in UTF8 string.)"),
    (b"[" + b"1" * 5000 + b"]", "f: item 1: not valid JSON (parse error: integer overflow)"),
    (b'[{"a": 1}, ' + b"[" * 200_000, "f: item 2: the item is nested more than 100 levels deep"),
    (b'{\n"a": 1,\n"b": x\n}', "f:3: not valid JSON (Expecting value at column 6)"),
    (b'{\n"a": 1}\n{"a": 2}', "f:3: not valid JSON (Extra data at column 1)"),
    (b'{"a": "cut', "f:1: not valid JSON (Unterminated string starting at column 7)"),
    (b'{"a": "cut\n{"a": 1}', "f:1: not valid JSON (Unterminated string starting at column 7)"),
    (b'{"a": ' + b"[" * 200_000, "f:1: not valid JSON"),
    (b"{\n" + b'"\xff": 1}', "f:1: the text is not valid UTF-8"),
    (b"1\n", "f:1: each line must be a JSON object, not int"),
]


@pytest.mark.parametrize(("data", "message"), WRONG, ids=[message for _, message in WRONG])
def test_unreadable_data_is_reported_with_its_place(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(InvalidJob) as caught:
        read(tmp_path / "f")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("start", [b'[{"a": "', b'{\n"a": "', b'{"a": "'])
def test_an_endless_row_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr("evalpool.api.formats.rows.MAX_ROW", 4 << 20)
    (tmp_path / "f").write_bytes(gzip.compress(start + b"x" * (6 << 20), 1))
    with pytest.raises(InvalidJob, match=r"f:( item )?1: .* (larger|longer) than 4 MiB"):
        read(tmp_path / "f")


def test_a_damaged_array_in_gzip_is_reported(tmp_path: Path) -> None:
    rows = [{"a": str(n) * 50} for n in range(20_000)]
    (tmp_path / "f").write_bytes(gzip.compress(json.dumps(rows).encode())[:-20])
    with pytest.raises(InvalidJob, match=r"f: item \d+: the gzip data is damaged at or after this line"):
        read(tmp_path / "f")


@pytest.mark.parametrize("start", ["[", ""])
def test_a_file_is_never_completely_in_memory(tmp_path: Path, start: str) -> None:
    row = json.dumps({"a": "x" * 100_000})
    with (tmp_path / "f").open("w") as file:  # 30 MB
        file.write(start + (",\n" if start else "\n").join([row] * 300) + ("]" if start else ""))
    tracemalloc.start()
    try:
        assert sum(1 for _ in Lines("f", tmp_path / "f")) == 300
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


def test_a_folder_of_objects_is_read_by_name_without_result_files(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text('{\n"a": 2\n}')
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"a": 1}'))
    (tmp_path / "a.results.json.gz").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    assert read(tmp_path) == [
        (f"{tmp_path.name}/a.json.gz:1", {"a": 1}),
        (f"{tmp_path.name}/b.json:1", {"a": 2}),
    ]


def test_a_folder_of_programs_is_read_in_the_order_of_numbers(tmp_path: Path) -> None:
    for task, number in (("HumanEval_2", 0), ("HumanEval_10", 10), ("HumanEval_10", 9)):
        (tmp_path / task).mkdir(exist_ok=True)
        (tmp_path / task / f"{number}.py").write_text(f"{number}")
    assert read(tmp_path) == [
        (f"{tmp_path.name}/HumanEval_2/0.py", {"task_id": "HumanEval/2", "solution": "0"}),
        (f"{tmp_path.name}/HumanEval_10/9.py", {"task_id": "HumanEval/10", "solution": "9"}),
        (f"{tmp_path.name}/HumanEval_10/10.py", {"task_id": "HumanEval/10", "solution": "10"}),
    ]
    (tmp_path / "HumanEval_2" / "0.py").write_bytes(b"\xff")
    with pytest.raises(InvalidJob, match=r"HumanEval_2/0.py: the file is not valid UTF-8"):
        read(tmp_path)


def test_the_digest_of_a_folder_depends_on_names_and_contents(tmp_path: Path) -> None:
    seen = set()
    for name, text in (("a.json", "{}"), ("b.json", "{}"), ("b.json", "{} ")):
        (tmp_path / name).write_text(text)
        seen.add(Lines("f", tmp_path).digest())
    assert len(seen) == 3
    (tmp_path / "notes.txt").write_text("are not read")
    assert Lines("f", tmp_path).digest() in seen


@pytest.mark.parametrize(
    ("name", "stem"),
    [("a/samples.jsonl", "samples"), ("x.json.gz", "x"), ("run_temp_0.8", "run_temp_0.8"), ("stdin", "stdin")],
)
def test_files_are_named_after_the_samples(name: str, stem: str) -> None:
    assert Lines(name, Path(name)).stem == stem


def test_a_shelf_returns_values_from_memory_and_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalpool.api.formats.shelf.MEMORY", 100)
    shelf = Shelf()
    values = [{"n": n, "text": "ä\ud800" * n} for n in range(20)]
    kept = [shelf.put(value) for value in values]
    assert [get() for get in reversed(kept)] == values[::-1]


def test_problems_larger_than_the_memory_are_found_by_their_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpool.api.formats.shelf.MEMORY", 1 << 20)
    with (tmp_path / "f").open("w") as file:
        file.writelines(json.dumps({"id": str(n), "text": str(n) * 30_000}) + "\n" for n in range(300))
    tracemalloc.start()
    try:
        problems = Problems(Lines("f", tmp_path / "f"), lambda row: str(row.fields["id"]))
        assert problems["299"]["text"][:6] == "299299"
        assert (len(problems), problems.place("299")) == (300, "f:300")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
