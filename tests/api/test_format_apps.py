"""APPS, TACO, PRIME and verl: tests are in `input_output`, candidates in one of several fields."""

import json
from pathlib import Path
from typing import Any

import pytest

from evalpool.api import formats
from evalpool.api.formats.calls import PREAMBLE
from evalpool.schemas import Case, InvalidJob, JobSpec
from tests.api.test_formats import jobs, lines, written

STDIN = {"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", ["4", "6"]]}


def row(tests: Any, **fields: Any) -> dict[str, Any]:
    return {"problem_id": 7, "input_output": tests if isinstance(tests, str) else json.dumps(tests), **fields}


def one(tmp_path: Path, tests: Any) -> JobSpec:
    (job,) = jobs(lines(tmp_path / "f.jsonl", row(tests, completion="x")))
    return job


def test_cases_on_standard_input_are_compared_by_words(tmp_path: Path) -> None:
    job = one(tmp_path, STDIN)
    assert job.cases == (Case("1\n", "2\n", comparator="tokens"), Case("2\n3", "4\n6", comparator="tokens"))
    assert (job.code, job.task_id, job.entry_point) == (PREAMBLE + "x", "7", None)
    assert job.limits.cpu_seconds == 4


def test_the_tests_may_be_an_object_too(tmp_path: Path) -> None:
    path = lines(tmp_path / "f.jsonl", {"id": 1, "input_output": STDIN, "code": "x"})
    with formats.read(path) as data:
        assert (data.format, data.count()) == ("apps", None)
        assert len(next(data.jobs()).cases) == 2


CALLS = [
    ({"inputs": [[[1, 2], "x"]], "outputs": [[3]]}, '[[1, 2], "x"]', "[3]"),
    ({"inputs": ['[1, 2]\n"x"'], "outputs": ["3"]}, '[[1, 2], "x"]', "3"),
    ({"inputs": [["x"]], "outputs": ["3"]}, '["x"]', '"3"'),
]


@pytest.mark.parametrize(("tests", "arguments", "expected"), CALLS, ids=["APPS", "verl", "APPS with a string"])
def test_a_function_is_called_with_its_arguments(tmp_path: Path, tests: Any, arguments: str, expected: str) -> None:
    job = one(tmp_path, {**tests, "fn_name": "f"})
    assert job.entry_point == "f"
    assert job.cases == (Case(arguments, expected, comparator="json:unwrap"),)


def test_asserts_are_a_check(tmp_path: Path) -> None:
    tests = {"inputs": ["", ""], "outputs": [None, None], "assert_case": ["assert f(1)", "", "assert f(2)"]}
    job = one(tmp_path, tests)
    assert (job.check, job.cases) == ("assert f(1)\nassert f(2)", ())


CANDIDATES = [
    ({"completion": "a", "solutions": '["z"]'}, ["a"]),
    ({"generation": "a"}, ["a"]),
    ({"solution": "a"}, ["a"]),
    ({"completions": ["a", "b"]}, ["a", "b"]),
    ({"generations": ["a", "b"], "solutions": ["z"]}, ["a", "b"]),
    ({"code_list": ["a", "b"]}, ["a", "b"]),
]


@pytest.mark.parametrize(("fields", "codes"), CANDIDATES, ids=[",".join(fields) for fields, _ in CANDIDATES])
def test_candidates_may_be_in_any_of_the_usual_fields(tmp_path: Path, fields: Any, codes: list[str]) -> None:
    found = jobs(lines(tmp_path / "f.jsonl", row(STDIN, **fields)))
    assert [(job.code.removeprefix(PREAMBLE), job.sample_id) for job in found] == list(
        zip(codes, range(9), strict=False)
    )


@pytest.mark.parametrize("key", ["task_id", "problem_id", "question_id", "id"])
def test_problems_in_a_file_of_their_own_are_found_by_id(tmp_path: Path, key: str) -> None:
    problems = lines(tmp_path / "problems.jsonl", row(STDIN, solutions='["r", "s"]'), row(STDIN, problem_id=8))
    path = lines(tmp_path / "samples.jsonl", *({key: "7", "completion": str(n)} for n in range(2)))
    with formats.read(path, problems=problems) as data:
        assert (data.format, data.count()) == ("apps", 2)
        assert [(job.task_id, job.sample_id) for job in data.jobs()] == [("7", 0), ("7", 1)]
        assert [job.code for job in data.references()] == [PREAMBLE + "r"]


def test_each_row_without_an_id_is_a_problem_of_its_own(tmp_path: Path) -> None:
    rows = [{"input_output": STDIN, "completions": ["a", "b"]}, {"input_output": STDIN, "completion": "c"}]
    found = jobs(lines(tmp_path / "f.jsonl", *rows))
    assert [(job.task_id, job.sample_id) for job in found] == [(0, 0), (0, 1), (1, 0)]


WRONG: list[tuple[Any, str]] = [
    (row("{", completion=""), '"input_output" is not valid JSON'),
    (row([], completion=""), '"input_output" must be an object'),
    (row({"inputs": ["1"], "outputs": []}, completion=""), "1 inputs, 0 outputs"),
    (row({}, completion=""), "0 inputs"),
    (row({"inputs": "12", "outputs": "12"}, completion=""), "not lists"),
    (row({"inputs": 5, "outputs": ["1"]}, completion=""), "not lists"),
    (row({"assert_case": "assert 1"}, completion=""), "not lists"),
    (row({**STDIN, "assert_case": ["assert 1"]}, completion=""), "2 inputs, 2 outputs and 1 asserts"),
    (row({"inputs": [1], "outputs": [1], "fn_name": "f"}, completion=""), "lists of arguments"),
    (row({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, completion=""), "not valid JSON"),
    (row({"inputs": [[1]], "outputs": ["1"], "fn_name": "a b"}, completion=""), "entry_point"),
    (row(STDIN), '"completion" must be a string'),
    (row(STDIN, solutions=""), '"completion" must be a string'),
    (row(STDIN, solutions='["right"]', generated="wrong"), '"completion" must be a string, and is missing'),
    (row(STDIN, completions=[1]), '"completions" must be a list of strings'),
]


@pytest.mark.parametrize(("bad", "named"), WRONG, ids=range(len(WRONG)))
def test_a_bad_row_is_reported_with_file_and_line(tmp_path: Path, bad: Any, named: str) -> None:
    path = lines(tmp_path / "f.jsonl", row(STDIN, completion=""), bad)
    with pytest.raises(InvalidJob, match=rf"f.jsonl:2: .*{named}"):
        jobs(path)


def test_a_bad_test_is_reported_with_the_line_of_its_problem(tmp_path: Path) -> None:
    path = lines(tmp_path / "samples.jsonl", {"task_id": 7, "completion": ""})
    with pytest.raises(InvalidJob, match=r"problems.jsonl:1: .input_output. must be an object"):
        jobs(path, problems=lines(tmp_path / "problems.jsonl", row([])))
    with pytest.raises(InvalidJob, match=r"samples.jsonl:1: problem: .* does not contain the problem '7'"):
        jobs(path, problems=lines(tmp_path / "problems.jsonl", row(STDIN, problem_id=8)))
    with pytest.raises(InvalidJob, match=r"samples.jsonl:1: one of task_id, problem_id, question_id, id must be"):
        jobs(lines(tmp_path / "samples.jsonl", {"completion": ""}), problems=str(tmp_path / "problems.jsonl"))


def test_calibration_without_reference_solutions_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "f.jsonl", row(STDIN, completion=""))
    with formats.read(path, problems=path) as data, pytest.raises(InvalidJob, match="no reference solution"):
        list(data.references())
    with formats.read(path) as data, pytest.raises(InvalidJob, match="--problems"):
        list(data.references())


def test_the_format_has_no_result_file_of_its_own(tmp_path: Path) -> None:
    assert written(lines(tmp_path / "f.jsonl", row(STDIN, completion="")), [], tmp_path) is None
