"""MBPP: asserts in a list, problems by number, and a file of problems that is also a file of samples."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from evalpool.api import formats
from evalpool.schemas import InvalidJob, Verdict
from tests.api.test_formats import PROBLEM, jobs, lines, results, written

FULL = {
    "task_id": 2,
    "text": "Double it.",
    "code": "class Box: pass\ndef double(x): return 2 * x",
    "test_list": ["assert double(1) == 2", "assert double(box) == 4"],
    "test_setup_code": "box = 2",
    "challenge_test_list": ["assert double(3) == 6"],
}
SANITIZED = {
    "task_id": 3,
    "prompt": "Take the root.",
    "code": "def root(x): return math.sqrt(x)",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(root(4), 2)"],
}


@pytest.fixture
def problems(tmp_path: Path) -> str:
    return lines(tmp_path / "mbpp.jsonl", FULL, SANITIZED)


def test_imports_come_before_the_candidate_and_setup_code_after_it(tmp_path: Path, problems: str) -> None:
    first, second = jobs(problems)
    assert first.code == FULL["code"]
    assert first.check == "box = 2\nassert double(1) == 2\nassert double(box) == 4"
    assert second.code == "import math\ndef root(x): return math.sqrt(x)"
    assert second.check == "import math\nassert math.isclose(root(4), 2)"
    assert (first.task_id, first.sample_id, first.limits.cpu_seconds) == (2, 0, 3)


def test_the_sanitized_file_is_an_array_and_a_file_of_samples(tmp_path: Path) -> None:
    path = tmp_path / "sanitized-mbpp.json.gz"
    path.write_bytes(gzip.compress(json.dumps([SANITIZED, SANITIZED], indent=2).encode()))
    with formats.read(str(path)) as data:
        assert (data.format, data.count()) == ("mbpp", None)
        assert [job.sample_id for job in data.jobs()] == [0, 1]


@pytest.mark.parametrize("key", ["completion", "solution", "code", "generation"])
def test_a_problem_is_found_by_its_number_however_that_is_written(tmp_path: Path, problems: str, key: str) -> None:
    rows = [{"task_id": task, key: "def double(x): ..."} for task in (2, "2", "Mbpp/2", "MBPP/2")]
    with formats.read(lines(tmp_path / "samples.jsonl", *rows), problems=problems) as data:
        found = list(data.jobs())
        assert (data.format, data.count()) == ("mbpp", 2)
    assert [(job.task_id, job.sample_id, job.code) for job in found] == [(2, n, rows[n][key]) for n in range(4)]


def test_the_reference_solutions_are_the_code_of_the_problems(tmp_path: Path, problems: str) -> None:
    path = lines(tmp_path / "samples.jsonl", {"task_id": 2, "completion": ""})
    with formats.read(path, problems=problems) as data:
        assert list(data.references()) == jobs(problems)
    with formats.read(path, "mbpp") as data, pytest.raises(InvalidJob, match=r"--problems mbpp.jsonl"):
        list(data.references())


def test_without_problems_the_error_asks_for_their_file(tmp_path: Path) -> None:
    path = lines(tmp_path / "samples.jsonl", {"task_id": "Mbpp/2", "solution": ""})
    with pytest.raises(InvalidJob, match=r'samples.jsonl:1: the row has no "test_list", and .*--problems mbpp.jsonl'):
        jobs(path)


def test_problems_with_a_test_of_human_eval_s_form_are_not_mbpp(tmp_path: Path) -> None:
    problems = lines(tmp_path / "problems.jsonl", {**PROBLEM, "task_id": "Mbpp/2"})
    path = lines(tmp_path / "samples.jsonl", {"task_id": "Mbpp/2", "solution": "def double(x): ..."})
    with formats.read(path, problems=problems) as data:
        assert data.format == "evalplus"
        assert len(list(data.jobs())) == 1


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"task_id": 9, "completion": ""}, "does not contain the problem '9'"),
        ({"task_id": 2, "completion": 1}, '"completion" must be a string'),
        ({"task_id": 2}, '"completion" must be a string'),
        ({"task_id": None, "completion": ""}, '"task_id" must be a number or a string'),
    ],
)
def test_a_bad_sample_is_reported_with_file_and_line(tmp_path: Path, problems: str, row: Any, named: str) -> None:
    path = lines(tmp_path / "samples.jsonl", {"task_id": 2, "completion": ""}, row)
    with pytest.raises(InvalidJob, match=rf"samples.jsonl:2: .*{named}"):
        jobs(path, problems=problems)


@pytest.mark.parametrize(
    "change", [{"test_list": "assert"}, {"test_list": []}, {"test_imports": [1]}, {"test_setup_code": 1}]
)
def test_a_bad_problem_is_reported_with_file_and_line(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=rf'bad.jsonl:2: "{next(iter(change))}"'):
        jobs(lines(tmp_path / "bad.jsonl", FULL, {**FULL, **change}))


def test_the_result_file_is_like_human_eval_s(tmp_path: Path, problems: str) -> None:
    file = written(problems, results(Verdict.PASSED, Verdict.WRONG_ANSWER), tmp_path)
    assert file == tmp_path / "mbpp.jsonl_results.jsonl"
    first, second = map(json.loads, file.read_text().splitlines())
    assert first == {**FULL, "result": "passed", "passed": True}
    assert second == {**SANITIZED, "result": "failed: so it was", "passed": False}
