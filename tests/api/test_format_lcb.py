"""LiveCodeBench: packed tests, outputs in three layouts, and its result file."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from evalpool.api import formats
from evalpool.api.formats.calls import PREAMBLE
from evalpool.api.formats.rows import MAX_ROW
from evalpool.schemas import CaseResult, InvalidJob, Verdict
from tests.api.test_formats import jobs, lines, report, results


def listed(kind: str, *pairs: tuple[str, str]) -> str:
    return json.dumps([{"input": one, "output": other, "testtype": kind} for one, other in pairs])


def packed(value: object, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


STDIN = {
    "question_id": "b",
    "question_content": "Double it.",
    "public_test_cases": listed("stdin", ("1\n", "2\n")),
    "private_test_cases": packed(listed("stdin", ("2\n", "4\n"))),
    "metadata": "{}",
}
CALL = {
    "question_id": "a",
    "public_test_cases": listed("functional", ('[1, 2]\n"x"', "[2, 4]")),
    "private_test_cases": listed("functional", ("", "null")),
    "metadata": '{"func_name": "double"}',
}


@pytest.fixture
def problems(tmp_path: Path) -> str:
    return lines(tmp_path / "test.jsonl", STDIN, CALL)


def test_public_tests_come_before_private_ones_and_lines_are_compared(tmp_path: Path, problems: str) -> None:
    path = lines(tmp_path / "out.jsonl", {"question_id": "b", "code": "print(2 * int(input()))"})
    with formats.read(path, problems=problems) as data:
        assert (data.format, data.count(), data.limits.cpu_seconds) == ("lcb", 2, 6)
        (job,) = data.jobs()
    assert [(case.stdin, case.expected, case.comparator) for case in job.cases] == [
        ("1\n", "2\n", "lcb"),
        ("2\n", "4\n", "lcb"),
    ]
    assert job.code == PREAMBLE + "print(2 * int(input()))"
    assert (job.entry_point, job.task_id, job.sample_id) == (None, "b", 0)


def test_a_function_is_called_with_one_argument_from_each_line(tmp_path: Path, problems: str) -> None:
    (job,) = jobs(lines(tmp_path / "out.jsonl", {"question_id": "a", "completion": "x"}), problems=problems)
    assert job.entry_point == "double"
    assert [(case.stdin, case.expected, case.comparator) for case in job.cases] == [
        ('[[1, 2], "x"]', "[2, 4]", "json"),
        ("[]", "null", "json"),
    ]


def test_the_imports_that_candidates_rely_on_are_one_line() -> None:
    assert PREAMBLE.count("\n") == 1
    space: dict[str, Any] = {}
    exec(PREAMBLE + "def f(x: List[int]) -> int: return pow(len(x), 2, 5) + sys.maxsize * 0", space)
    assert space["f"]([1, 2]) == 4


OUTPUTS = [
    [{"question_id": "b", "code_list": ["1", "2"]}, {"question_id": "a", "code_list": ["3"]}],
    [["3"], ["1", "2"]],
]


@pytest.mark.parametrize("outputs", OUTPUTS, ids=["objects", "lists in the order of ids"])
def test_outputs_are_an_array_of_objects_or_of_lists(tmp_path: Path, problems: str, outputs: Any) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps(outputs))
    found = sorted(jobs(str(path), problems=problems), key=lambda job: job.code)
    assert [(job.task_id, job.sample_id, job.code) for job in found] == [
        ("b", 0, PREAMBLE + "1"),
        ("b", 1, PREAMBLE + "2"),
        ("a", 0, PREAMBLE + "3"),
    ]
    assert found[0].cases[0] is found[1].cases[0]  # megabytes, once


@pytest.mark.parametrize("protocol", range(1, 6))
def test_a_pickle_of_a_string_is_read_whatever_its_protocol(tmp_path: Path, protocol: int) -> None:
    problem = {**STDIN, "private_test_cases": packed(listed("stdin", ("3" * 70_000, "ä")), protocol)}
    path = lines(tmp_path / "out.jsonl", {"question_id": "b", "code": ""})
    (job,) = jobs(path, problems=lines(tmp_path / "test.jsonl", problem))
    assert (len(job.cases[1].stdin), job.cases[1].expected) == (70_000, "ä")


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("touched"),)


BOMB = base64.b64encode(zlib.compress(b"\0" * (MAX_ROW + 1), 1)).decode()
PACKED = [
    (packed(Hostile()), "not loaded"),
    (packed([listed("stdin")]), "not loaded"),
    (packed(b"bytes"), "not loaded"),
    (base64.b64encode(zlib.compress(b"\x80\x04" + b"N" * 30_000_000 + b".", 1)).decode(), "not loaded"),
    (base64.b64encode(zlib.compress(b"\x80\x04X\xff\xff\xff\xffx.")).decode(), "damaged"),
    (BOMB, "more than 64 MiB"),
    (packed("x" * (MAX_ROW + 1)), "more than 64 MiB"),
    (packed("not json"), "is not valid JSON"),
    (packed("[1]"), "must be a list of objects"),
    (packed('{"a": 1}'), "must be a list of objects"),
    ("!", "damaged"),
    (base64.b64encode(b"no zlib").decode(), "damaged"),
]


@pytest.mark.parametrize(("private", "named"), PACKED, ids=range(len(PACKED)))
def test_a_hostile_or_damaged_pickle_is_refused_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = lines(tmp_path / "out.jsonl", {"question_id": "b", "code": ""})
    problems = lines(tmp_path / "test.jsonl", CALL, {**STDIN, "private_test_cases": private})
    with pytest.raises(InvalidJob, match=rf'test.jsonl:2: "private_test_cases" .*({named})'):
        jobs(path, problems=problems)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"metadata": "{}"}, "the function name None"),
        ({"metadata": "["}, '"metadata" is not valid JSON'),
        ({"public_test_cases": listed("stdin", ("", ""))}, r"types \['functional', 'stdin'\]"),
        ({"public_test_cases": "[]", "private_test_cases": "[]"}, r"types \[\]"),
        ({"public_test_cases": listed("functional", ("1,", "1"))}, "not valid JSON"),
        ({"public_test_cases": listed("functional", ("1", "one"))}, "not valid JSON"),
    ],
)
def test_a_bad_problem_is_reported_with_file_and_line(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = lines(tmp_path / "out.jsonl", {"question_id": "a", "code": ""})
    with pytest.raises(InvalidJob, match=rf"test.jsonl:1: .*{named}"):
        jobs(path, problems=lines(tmp_path / "test.jsonl", {**CALL, **change}))


def test_bad_outputs_are_reported_with_their_place(tmp_path: Path, problems: str) -> None:
    path = lines(tmp_path / "out.jsonl", {"question_id": "c", "code": ""})
    with pytest.raises(InvalidJob, match=r"out.jsonl:1: question_id: .* does not contain the problem 'c'"):
        jobs(path, problems=problems)
    with pytest.raises(InvalidJob, match=r"--problems test.jsonl"):
        jobs(path)
    (tmp_path / "out.json").write_text('[["1"], ["2"], ["3"]]')
    with pytest.raises(InvalidJob, match=r"out.json: item 3: .*test.jsonl has only 2 problems"):
        jobs(str(tmp_path / "out.json"), problems=problems)
    path = lines(tmp_path / "odd.jsonl", {"question_id": "b", "index": "x", "code": ""}, {"index": "x", "code": ""})
    with pytest.raises(InvalidJob, match=r'odd.jsonl:2: "question_id" must be a string'):
        jobs(path, problems=problems)
    with formats.read(path, problems=problems) as data, pytest.raises(InvalidJob, match="no reference solutions"):
        list(data.references())


def test_the_result_file_has_scores_grades_and_notes(tmp_path: Path, problems: str) -> None:
    verdicts = [Verdict.PASSED, Verdict.WRONG_ANSWER, Verdict.COMPILE_ERROR, Verdict.SANDBOX_ERROR, Verdict.CANCELLED]
    cases = [
        tuple(CaseResult(index=n, verdict=verdict) for n, verdict in enumerate(given))
        for given in ([Verdict.PASSED] * 2, [Verdict.PASSED, Verdict.WRONG_ANSWER], [], [Verdict.PASSED], [])
    ]
    found = results(*verdicts, task_id=["b", "b", "a", "a", "a"], cases=cases)
    path = lines(tmp_path / "out.jsonl", {"question_id": "a", "code": ""})
    with formats.read(path, problems=problems) as data:
        file = data.write(iter(found), tmp_path, report(pass_at_k={1: 0.25}))
    assert file == tmp_path / "out_eval.json"
    metrics, grades, notes = json.loads(file.read_text())
    assert metrics == {"pass@1": 0.25, "detail": {"pass@1": {"0": 0.0, "1": 0.5}}}
    assert grades == {"0": [[-4], [True, -5]], "1": [[True, True], [True, -2]]}
    assert [len(each) for each in notes] == [2, 2]
    assert json.loads(notes[1][1]) == {"error_code": -2, "error_message": "wrong_answer: so it was"}
    assert json.loads(notes[1][0]) == {"execution time": 0.0}
