"""MultiPL-E: a file for each problem, many languages, and a result file for each problem."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from evalpool.api import formats
from evalpool.schemas import InvalidJob, Verdict
from evalpool.schemas.job import LANGUAGES
from tests.api.test_formats import jobs, lines, results, written

BASH = {
    "name": "Toy_0_double",
    "language": "sh",
    "prompt": "double() {\n",
    "tests": "}\n[[ $(double 2) = 4 ]]",
    "stop_tokens": ["\n}"],
}
PYTHON = {
    **BASH,
    "name": "Toy_1_double",
    "language": "py",
    "prompt": "def double(x):\n",
    "tests": "assert double(2) == 4",
}


@pytest.mark.parametrize("indent", [None, 2])
def test_each_completion_of_a_file_is_a_job(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "Toy_0_double.json.gz"
    path.write_bytes(
        gzip.compress(json.dumps({**BASH, "completions": ["  echo 4", "  echo 5"]}, indent=indent).encode())
    )
    with formats.read(str(path)) as data:
        assert (data.format, data.count(), data.limits.cpu_seconds) == ("multipl-e", None, 15)
        first, second = data.jobs()
    assert (first.tool, first.language, first.check) == ("multi_code_executor", "bash", None)
    assert first.code == "double() {\n  echo 4\n}\n[[ $(double 2) = 4 ]]"
    assert [(job.task_id, job.sample_id) for job in (first, second)] == [("Toy_0_double", 0), ("Toy_0_double", 1)]


def test_tests_in_python_are_a_check(tmp_path: Path) -> None:
    (job,) = jobs(lines(tmp_path / "f.jsonl", {**PYTHON, "completions": ["    return 2 * x"]}))
    assert (job.tool, job.check) == ("python_executor", "assert double(2) == 4")
    assert job.code == "def double(x):\n    return 2 * x"


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    for row in (PYTHON, BASH):
        lines(tmp_path / f"{row['name']}.json", {**row, "completions": ["x"]})
    assert [job.task_id for job in jobs(str(tmp_path))] == ["Toy_0_double", "Toy_1_double"]


@pytest.mark.parametrize("key", ["name", "task_id"])
def test_problems_in_a_file_of_their_own_are_found_by_name(tmp_path: Path, key: str) -> None:
    problems = lines(tmp_path / "humaneval-sh.jsonl", BASH, PYTHON)
    path = lines(tmp_path / "samples.jsonl", *({key: BASH["name"], "completion": str(n)} for n in range(2)))
    with formats.read(path, problems=problems) as data:
        assert (data.format, data.count()) == ("multipl-e", 2)
        assert [(job.language, job.sample_id) for job in data.jobs()] == [("bash", 0), ("bash", 1)]
        with pytest.raises(InvalidJob, match="no reference solutions"):
            list(data.references())


def test_names_of_languages_are_translated_to_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"js": "javascript", "ts": "typescript", "cpp": "cpp", "java": "java", "rb": "ruby", "pl": "perl"}
    words |= {"lua": "lua", "php": "php", "r": "r", "rs": "rust", "go_test.go": "go_test", "sh": "bash"}
    monkeypatch.setitem(LANGUAGES, "multi_code_executor", tuple(words.values()))
    rows = [{**BASH, "language": word, "completions": [""]} for word in words]
    assert [job.language for job in jobs(lines(tmp_path / "f.jsonl", *rows))] == list(words.values())


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({**BASH, "language": "fortran", "completions": ["x"]}, "language: 'fortran' is not one of"),
        ({**BASH, "completions": "x"}, '"completions" must be a list of strings'),
        (BASH, '"completion" must be a string'),
        ({**BASH, "tests": None, "completions": ["x"]}, '"tests" must be a string'),
    ],
)
def test_a_bad_row_is_reported_with_file_and_line(tmp_path: Path, row: Any, named: str) -> None:
    path = lines(tmp_path / "f.jsonl", {**BASH, "completions": []}, row)
    with pytest.raises(InvalidJob, match=rf"f.jsonl:2: .*{named}"):
        jobs(path)


def test_an_unknown_name_is_reported(tmp_path: Path) -> None:
    path = lines(tmp_path / "samples.jsonl", {"name": "Toy_9", "completion": ""})
    with pytest.raises(InvalidJob, match=r"samples.jsonl:1: name: .* does not contain the problem 'Toy_9'"):
        jobs(path, problems=lines(tmp_path / "problems.jsonl", BASH))


def test_there_is_a_result_file_for_each_problem(tmp_path: Path) -> None:
    rows = [
        {**BASH, "completions": ["a", "b", "c"], "temperature": 0.2, "completion_tokens": 3},
        {**PYTHON, "name": "../up/0", "completion": "d"},
        {**BASH, "completion": "e"},
    ]
    verdicts = [Verdict.PASSED, Verdict.TIME_LIMIT, Verdict.SANDBOX_ERROR, Verdict.COMPILE_ERROR, Verdict.EARLY_EXIT]
    found = results(*verdicts, exit_code=[0, None, None, 1, 0], stdout="x" * 5000)
    folder = written(lines(tmp_path / "f.jsonl", *rows), found, tmp_path)
    assert folder == tmp_path / "multipl-e"
    assert sorted(path.name for path in folder.iterdir()) == [".._up_0.results.json", "Toy_0_double.results.json"]
    first = json.loads((folder / "Toy_0_double.results.json").read_text())
    made = first.pop("results")
    assert first == {**BASH, "temperature": 0.2, "completion_tokens": 3}
    assert [(entry["status"], entry["exit_code"]) for entry in made] == [("OK", 0), ("Timeout", -1), ("Exception", 0)]
    assert made[0]["program"] == "double() {\na\n}\n[[ $(double 2) = 4 ]]"
    assert (len(made[0]["stdout"]), made[0]["stderr"]) == (2048, "")
    assert made[0]["timestamp"] == int(found[0].finished_at.timestamp())
    (entry,) = json.loads((folder / ".._up_0.results.json").read_text())["results"]
    assert entry["status"] == "SyntaxError"
