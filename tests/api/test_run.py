"""`evalpool run` end to end, with nothing configured: it brings up what it needs, and takes it down again."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.conftest import PATIENCE, ROOT, eventually

pytestmark = [pytest.mark.redis, pytest.mark.docker]


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "api.cli", "run", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(autouse=True)
def _needed(engine_client: docker.DockerClient, redis_server: str) -> None:
    """A Docker engine, and the binary of a Redis."""


def test_a_file_is_evaluated_and_the_same_command_again_only_reports(tmp_path: Path) -> None:
    rows = [{"code": "print(6 * 7)", "tests": [{"type": "stdio", "expected_stdout": text}]} for text in ("42", "43")]
    path = write(tmp_path / "jobs.jsonl", *rows)
    summaries = []
    for _ in range(2):
        process = start(path, "--json", "--slots", "2", "--out", str(tmp_path / "out"))
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        summaries.append(json.loads(out))
    assert summaries[0]["verdicts"] == {"passed": 1, "wrong_answer": 1}
    assert summaries[0]["pass_at_k"] == {"1": 0.5}
    assert summaries[1] == summaries[0]
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 2


def test_an_interrupted_run_says_how_to_go_on_and_does_not_lose_what_is_finished(tmp_path: Path) -> None:
    started = tmp_path / "state" / "evalpool.db"
    path = write(tmp_path / "jobs.jsonl", *({"code": f"import time; time.sleep(1)  # {n}"} for n in range(8)))
    process = start(path, "--slots", "2")
    eventually(lambda: started.exists() and finished(started) >= 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "the same command again resumes it" in err
    kept = finished(started)
    assert 2 <= kept < 8
    process = start(path, "--json", "--slots", "2")
    out, err = process.communicate(timeout=PATIENCE)
    assert json.loads(out)["verdicts"] == {"passed": 8}, err


def test_a_worker_that_cannot_start_ends_the_run_with_1_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALPOOL_IMAGE", "nobody/has:it")
    process = start(write(tmp_path / "jobs.jsonl", {"code": "1"}))
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert out == ""
    assert "nobody/has:it" in err
    assert "Traceback" not in err


def test_samples_of_a_harness_are_scored_calibrated_repeated_and_shared(tmp_path: Path) -> None:
    problem = {
        "task_id": "Toy/0", "prompt": "def double(x):\n", "entry_point": "double",
        "canonical_solution": "    return 2 * x\n", "test": "def check(f):\n    assert f(2) == 4\n",
    }  # fmt: skip
    other = problem | {"task_id": "Toy/1", "canonical_solution": "    return 3 * x\n"}
    problems = write(tmp_path / "problems.jsonl", problem, other)
    right, wrong, flaky = (
        "    return x + x\n",
        "    return x\n",
        "    import random\n    return 4 if random.random() < 0.5 else 5\n",
    )
    samples = [{"task_id": "Toy/0", "completion": text} for text in (right, right, wrong, *[flaky] * 5)]
    samples.append({"task_id": "Toy/1", "completion": flaky})
    path, out = write(tmp_path / "samples.jsonl", *samples), tmp_path / "out"

    def evalpool(*options: str) -> tuple[dict[str, Any], str]:
        process = start(path, "--problems", problems, "--json", "--slots", "2", "--out", str(out), *options)
        stdout, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        return json.loads(stdout), err

    once, _ = evalpool()
    assert once["deduplicated"] == 1 + 5  # both problems have the same tests
    assert (once["tasks"], once["problems"]) == (2, 2)
    own = [json.loads(line)["passed"] for line in (out / "samples.jsonl_results.jsonl").read_text().splitlines()]
    assert own[:3] == [True, True, False]

    thrice, err = evalpool("--repeat", "9", "--calibrate")
    assert "the reference solution of Toy/1 did not pass" in err
    assert (thrice["total"], thrice["deduplicated"]) == (9, 0)
    assert thrice["flaky"]  # all alike six times nine times: once in 10^13 runs
    assert not {job[-6:] for job in thrice["flaky"]} & {"000000", "000001", "000002"}
    assert len((out / "repeats.jsonl").read_text().splitlines()) == 8 * 9

    again, _ = evalpool("--cache", "--force")
    assert again["deduplicated"] == 9


def finished(database: Path) -> int:
    """Results in the ledger of a run."""
    from sqlalchemy import create_engine
    from sqlalchemy.exc import OperationalError

    engine = create_engine(f"sqlite:///{database}")
    try:
        with engine.connect() as db:
            return int(db.exec_driver_sql("SELECT count(*) FROM results").scalar_one())
    except OperationalError:  # not made yet
        return 0
    finally:
        engine.dispose()
