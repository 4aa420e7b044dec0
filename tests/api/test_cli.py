"""The command line: exit codes, and what goes to which stream."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evalpool.api import submit_batch
from evalpool.api.cli import main
from evalpool.api.formats import read
from evalpool.api.runs import Run, say
from evalpool.schemas import Settings, Verdict
from evalpool.schemas.rows import job_id
from evalpool.schemas.store import Store
from tests.api.conftest import Finish, record, rows

Output = pytest.CaptureFixture[str]

BAD_LINES: list[tuple[Any, str]] = [
    ({"code": "x", "bogus": 1}, "bogus"),
    ({"code": "x", "tool": "perl"}, "tool"),
    ({"code": "x", "limits": {"cpu_seconds": -1}}, "limits.cpu_seconds"),
    ({"code": "x", "files": {"/etc/x": ""}}, "files"),
    ({"code": "x", "files": {"../x": ""}}, "files"),
    ({"code": "x" * (11 << 20)}, "code"),
    ("{not json", "not valid JSON"),
]


def evalpool(*arguments: str) -> int:
    """Run a command in this process, and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def finished(path: str, finish: Finish, *verdicts: Verdict) -> str:
    """Submit a file as `run` does, and record these verdicts for its jobs."""
    with read(path) as data:
        batch = Run(data, sum(1 for _ in data.jobs())).submit()
    for seq, verdict in enumerate(verdicts):
        finish([job_id(batch.id, seq)], verdict)
    return batch.id


@pytest.mark.parametrize("command", ["run", "submit"])
@pytest.mark.parametrize(("line", "named"), BAD_LINES, ids=[named for _, named in BAD_LINES])
def test_a_bad_line_ends_with_2_and_names_the_place_and_leaves_no_row(
    store: Store, tmp_path: Path, capsys: Output, command: str, line: Any, named: str
) -> None:
    path = write(tmp_path / "jobs.jsonl", {"code": "fine"}, line)
    assert evalpool(command, path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{path}:2: " in err
    assert named in err
    assert len(err.splitlines()) == 1
    assert rows(store) == 0


@pytest.mark.parametrize("command", ["run", "submit"])
@pytest.mark.parametrize(
    ("first", "options", "line"),
    [
        ({"code": "x", "limits": {"memory_mb": 4096}}, [], 2),
        ({"code": "x"}, ["--memory-mib", "8192"], 1),
        ({"task_id": "HumanEval/0", "completion": "x"}, ["--memory-mib", "8192"], 1),
    ],
)
def test_a_line_above_the_operators_ceiling_is_refused_with_file_and_line(
    store: Store,
    tmp_path: Path,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    first: Any,
    options: list[str],
    line: int,
) -> None:
    monkeypatch.setenv("EVALPOOL_MAX_MEMORY_MIB", "4096")
    path = write(tmp_path / "jobs.jsonl", first, {"code": "x", "limits": {"memory_mib": 8192}})
    assert evalpool(command, path, *options) == 2
    said = f"evalpool: {path}:{line}: limits.memory_mib: 8192 is more than the 4096 that EVALPOOL_MAX_MEMORY_MIB allows"
    assert capsys.readouterr().err == f"{said}\n"
    assert rows(store) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "FILE", "--k", "0"],
        ["run", "FILE", "--k", "one"],
        ["run", "FILE", "--cpu-seconds", "-1"],
        ["run", "FILE", "--memory-mib", "1"],
        ["run", "FILE", "--fail-under", "2"],
        ["run", "FILE", "--slots", "0"],
        ["run", "FILE", "--format", "parquet"],
        ["run", "FILE", "--problems", "FILE"],
        ["run", "FILE", "--out", "/dev/null/x"],
        ["run", "FILE", "--isolation", "cold"],
        ["run", "FILE", "--priority", "urgent"],
        ["run", "FILE", "--image", "-x"],
        ["run", "FILE", "--label", "novalue"],
        ["run", "FILE", "--label", "=nokey"],
        ["run", "nowhere.jsonl"],
        ["status", "nobody"],
        ["results", "nobody"],
        ["report", "nobody"],
        ["cancel", "nobody"],
        ["dance"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2(store: Store, tmp_path: Path, capsys: Output, arguments: list[str]) -> None:
    path = write(tmp_path / "jobs.jsonl", {"code": "x"})
    assert evalpool(*(path if word == "FILE" else word for word in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err
    assert rows(store) == 0


def test_an_unreachable_queue_ends_with_1_and_one_line(
    store: Store, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALPOOL_REDIS_URL", "redis://127.0.0.1:1/0")
    assert evalpool("submit", write(tmp_path / "jobs.jsonl", {"code": "x"})) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "need not be submitted again" in err.splitlines()[-1]


@pytest.mark.redis
def test_submit_prints_only_the_batch_id_and_the_same_id_again(
    store: Store, redis_url: str, tmp_path: Path, capsys: Output
) -> None:
    path = write(tmp_path / "jobs.jsonl", {"code": "x"})
    printed = []
    for options in ([], [], ["--force"], ["--cpu-seconds", "1"]):
        assert evalpool("submit", path, *options) == 0
        printed.append(capsys.readouterr().out)
    assert store.batch(printed[0].strip()).total == 1
    assert printed[0] == printed[1]
    assert len(set(printed)) == 3


@pytest.mark.redis
def test_run_reports_a_finished_batch_at_once_and_exports_it(finish: Finish, tmp_path: Path, capsys: Output) -> None:
    path = write(tmp_path / "jobs.jsonl", {"code": "a", "task_id": 1}, {"code": "b", "task_id": 2})
    batch_id = finished(path, finish, Verdict.PASSED, Verdict.WRONG_ANSWER)
    out = tmp_path / "out"
    assert evalpool("run", path, "--json", "--out", str(out), "--k", "1,2") == 0
    stdout, stderr = capsys.readouterr()
    summary = json.loads(stdout)
    assert summary.pop("seconds") >= 0
    assert summary.pop("jobs_per_second") >= 0
    assert summary == {
        "batch_id": batch_id,
        "total": 2,
        "verdicts": {"passed": 1, "wrong_answer": 1},
        "pass_at_k": {"1": 0.5},
        "intervals": {"1": [0.0, 1.0]},
        "tasks": 2,
        "problems": None,
        "excluded": 0,
        "warnings": [],
        "near_limit": 0,
        "rerun": 0,
        "deduplicated": 0,
        "flaky": [],
    }
    assert "format: native jobs (2 jobs, 2 tasks)" in stderr
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(row["task_id"], row["verdict"], row["passed"]) for row in found] == [
        (1, "passed", True),
        (2, "wrong_answer", False),
    ]
    assert batch_id in (out / "report.html").read_text()
    assert {path.name for path in out.iterdir()} == {
        "results.jsonl", "results.csv", "results.parquet", "junit.xml", "report.html",
    }  # fmt: skip


@pytest.mark.redis
def test_the_last_line_of_a_report_is_a_dict(finish: Finish, tmp_path: Path, capsys: Output) -> None:
    path = write(tmp_path / "jobs.jsonl", {"code": "a"})
    finished(path, finish, Verdict.PASSED)
    assert evalpool("run", path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "{'pass@1': 1.0}"


@pytest.mark.redis
def test_a_score_below_the_threshold_ends_with_6(finish: Finish, tmp_path: Path, capsys: Output) -> None:
    path = write(tmp_path / "jobs.jsonl", {"code": "a"}, {"code": "b"})
    finished(path, finish, Verdict.PASSED, Verdict.WRONG_ANSWER)
    assert evalpool("run", path, "--json", "--fail-under", "0.51", "--k", "2") == 6
    assert json.loads(capsys.readouterr().out)["pass_at_k"] == {}
    assert evalpool("run", path, "--fail-under", "0.5") == 0


@pytest.mark.redis
@pytest.mark.parametrize("verdict", [Verdict.SANDBOX_ERROR, Verdict.CANCELLED])
def test_jobs_without_a_verdict_on_their_program_end_with_5(finish: Finish, tmp_path: Path, verdict: Verdict) -> None:
    path = write(tmp_path / "jobs.jsonl", {"code": "a"}, {"code": "b"})
    finished(path, finish, Verdict.WRONG_ANSWER, verdict)
    assert evalpool("run", path, "--fail-under", "1") == 5


@pytest.mark.redis
def test_a_second_run_says_how_many_jobs_could_not_be_run(finish: Finish, tmp_path: Path, capsys: Output) -> None:
    path = write(tmp_path / "jobs.jsonl", {"code": "a"}, {"code": "b"})
    finished(path, finish, Verdict.PASSED, Verdict.SANDBOX_ERROR)
    assert evalpool("run", path) == 5
    said = "is complete, but 1 of its 2 jobs could not be run (sandbox_error); nothing was run now, --force runs"
    assert said in capsys.readouterr().err


@pytest.mark.redis
def test_a_batch_can_be_inspected_and_cancelled(finish: Finish, capsys: Output) -> None:
    batch = submit_batch([{"code": "x"}] * 3)
    finish([job_id(batch.id, 0)])
    assert evalpool("status", batch.id, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "batch_id": batch.id, "total": 3, "queued": 2, "running": 0, "finished": 1, "cancelled": 0,
        "verdicts": {"passed": 1}, "waiting_for": ["no worker is running"],
    }  # fmt: skip
    assert evalpool("status", batch.id) == 0
    assert "queued" in capsys.readouterr().out
    assert evalpool("cancel", batch.id) == 0
    assert capsys.readouterr().out == ""
    assert evalpool("results", batch.id) == 0
    verdicts = [json.loads(line)["verdict"] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == ["passed", "cancelled", "cancelled"]
    assert evalpool("report", batch.id, "--json") == 0
    assert json.loads(capsys.readouterr().out)["total"] == 3


ODD = "\x1b[2J \x9b31m \x85 \u202e \u2066 \u2028 \u200b 日本"
OBEYED = set(ODD) - set("[2J 31m日本")


@pytest.mark.redis
def test_text_from_programs_and_callers_is_escaped_for_the_terminal(
    store: Store, redis_url: str, capsys: Output
) -> None:
    batch = submit_batch([{"code": "x", "task_id": ODD, "labels": {ODD: ODD}}], name=f"{ODD}\nline")
    record(store, [job_id(batch.id, 0)], stdout=ODD, stderr=ODD, detail=ODD)
    assert evalpool("results", batch.id) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed)
    assert [result[name] for name in ("stdout", "stderr", "detail", "task_id")] == [ODD] * 4
    assert result["labels"] == {ODD: ODD}
    assert "日本" in printed
    assert evalpool("report", batch.id) == 0
    printed += capsys.readouterr().out
    assert evalpool("status", ODD) == 2
    printed += capsys.readouterr().err
    assert "\\u202e" in printed
    assert not OBEYED & set(printed)


def test_notes_are_escaped_for_the_terminal_too(capsys: Output) -> None:
    say(f"the reference solution of {ODD} did not pass: {ODD}")
    printed = capsys.readouterr().err
    assert "\\u009b31m" in printed
    assert not OBEYED & set(printed)


@pytest.mark.redis
def test_the_doctor_also_checks_redis_and_the_database(
    store: Store, redis_url: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("evalpool.worker.machine.doctor.examine", lambda: [])
    assert evalpool("doctor") == 0
    out = capsys.readouterr().out
    assert "maxmemory-policy noeviction" in out
    assert "schema known" in out
    monkeypatch.setenv("EVALPOOL_REDIS_URL", "redis://127.0.0.1:1/0")
    assert evalpool("doctor") == 1
    assert "correct EVALPOOL_REDIS_URL" in capsys.readouterr().out


@pytest.mark.redis
def test_the_doctor_says_which_redis_is_used_if_none_is_configured(
    store: Store, redis_server: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("evalpool.worker.machine.doctor.examine", lambda: [])
    for url, said in (("redis://127.0.0.1:1/0", "which does not answer"), (redis_server, "version ")):
        monkeypatch.setattr(Settings, "queue_url", url)
        assert evalpool("doctor") == 0
        out = capsys.readouterr().out
        assert "`evalpool run` starts a private" in out
        assert f"all else uses {url}, {said}" in out


@pytest.mark.parametrize("module", ["typer", "evalpool.schemas.errors"])
def test_ctrl_c_while_modules_are_imported_ends_with_130_and_no_traceback(module: str) -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from evalpool.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path.cwd())
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("how", ["version", "--version"])
def test_the_version_is_printed_without_loading_the_queue_or_the_database(how: str) -> None:
    code = (
        "import sys; from api.cli import main\n"
        f"try: main(['{how}'])\n"
        "finally: print(*(m for m in ('celery', 'sqlalchemy', 'docker') if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path.cwd())
    assert done.returncode == 0
    assert done.stdout.strip()
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("command", "env", "told"),
    [
        (
            ("worker",),
            {"EVALPOOL_SLOT": "4"},
            "EVALPOOL_SLOT is not a setting of evalpool; did you mean EVALPOOL_SLOTS?",
        ),
        (("worker",), {"EVALPOOL_REDIS_URL": "http://x"}, "EVALPOOL_REDIS_URL='http://x': it must begin with redis://"),
        (
            ("images", "list"),
            {"DOCKER_HOST": "tcp://127.0.0.1:1"},
            "the Docker engine at tcp://127.0.0.1:1 does not answer (Connection refused); ",
        ),
        (
            ("images", "build"),
            {"DOCKER_HOST": "tcp://127.0.0.1:1"},
            "the Docker engine at tcp://127.0.0.1:1 does not answer (Connection refused); ",
        ),
    ],
)
def test_a_command_names_what_is_missing_in_one_line_without_a_traceback(
    command: tuple[str, ...], env: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("a worker was started"))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert evalpool(*command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"evalpool: {told}")
