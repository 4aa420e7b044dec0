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
