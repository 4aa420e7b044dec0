"""`evalpool run` end to end with nothing configured: it starts what it needs, and stops it again."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import pytest

from evalpool.api import get_batch, submit_job
from evalpool.schemas import Settings, State
from evalpool.schemas.database import Database
from evalpool.schemas.store import Store
from tests.conftest import PATIENCE, ROOT, WorkerProcess, eventually

pytestmark = [pytest.mark.redis, pytest.mark.docker]

CODE_IMAGE = Settings.model_fields["code_image"].default


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "evalpool", "run", *arguments],
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
    """These tests need a Docker engine and a Redis server."""


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


def test_the_jobs_of_a_private_run_go_only_to_its_own_worker(
    tmp_path: Path,
    store: Store,
    redis_url: str,
    start_worker: Callable[..., WorkerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another worker waits on the same database, with the same images."""
    start_worker(EVALPOOL_WORKER_NAME="idle", EVALPOOL_RECONCILE_SECONDS="0.1")
    monkeypatch.delenv("EVALPOOL_REDIS_URL")
    path = write(tmp_path / "jobs.jsonl", *({"code": f"import time; time.sleep(0.2)  # {n}"} for n in range(20)))
    process = start(path, "--json", "--slots", "2", "--out", str(tmp_path / "out"))
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert len(results) == 20
    assert "idle" not in {result["worker"] for result in results}
    batch = json.loads(out)["batch_id"]
    for command in ("status", "results", "report"):
        done = subprocess.run(
            [sys.executable, "-m", "evalpool", command, batch],
            cwd=ROOT,
            env=os.environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


def test_a_private_run_leaves_the_jobs_of_others_alone(
    tmp_path: Path, store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = submit_job(code="1", priority="high")
    monkeypatch.delenv("EVALPOOL_REDIS_URL")
    process = start(write(tmp_path / "jobs.jsonl", {"code": "1"}), "--json", "--slots", "2")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert foreign.state() is State.QUEUED
    assert get_batch(json.loads(out)["batch_id"]).progress().complete


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
    assert re.search(r"1 waiting job of batch \w+ was cancelled", err)
    assert verdicts(tmp_path / "state" / "evalpool.db") == ["cancelled"]  # nobody else will find it in the queue
    monkeypatch.delenv("EVALPOOL_IMAGE")
    process = start(str(tmp_path / "jobs.jsonl"), "--json")
    out, err = process.communicate(timeout=PATIENCE)
    assert json.loads(out)["verdicts"] == {"passed": 1}, err


def test_an_image_that_does_not_exist_is_refused_in_one_sentence_before_anything_is_stored(tmp_path: Path) -> None:
    process = start(write(tmp_path / "jobs.jsonl", {"code": "1"}), "--image", "nobody/has:it")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert out == ""
    _, said = err.splitlines()  # the first line names the format
    assert said.startswith("evalpool: --image: there is no image 'nobody/has:it' on this machine; ")
    assert "`docker pull nobody/has:it`" in said
    assert not verdicts(tmp_path / "state" / "evalpool.db")


def test_a_run_whose_worker_dies_says_that_its_other_jobs_wait_and_how_to_go_on(tmp_path: Path) -> None:
    ledger = tmp_path / "state" / "evalpool.db"
    path = write(tmp_path / "jobs.jsonl", *({"code": f"import time; time.sleep(1)  # {n}"} for n in range(8)))
    process = start(path, "--slots", "2")
    eventually(lambda: ledger.exists() and finished(ledger) >= 2)
    (worker,) = children(process.pid, "worker")
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    said = re.search(r"(\d) of the 8 jobs of batch (\w+) are finished; the others wait, and the same", err)
    assert said
    assert 2 <= int(said[1]) < 8
    status = [sys.executable, "-m", "evalpool", "status", said[2]]
    why = "for the `evalpool run` that submitted them, which has ended"  # said when its worker has been silent for long
    eventually(lambda: why in subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    process = start(path, "--json", "--slots", "2")
    out, err = process.communicate(timeout=PATIENCE)
    assert json.loads(out)["verdicts"] == {"passed": 8}, err


def test_options_choose_the_image_the_isolation_the_priority_and_the_labels_of_all_jobs(tmp_path: Path) -> None:
    rows = [{"code": "import sys"}, {"code": "x = 1", "labels": {"who": "its own", "other": 1}, "isolation": "warm"}]
    path = write(tmp_path / "jobs.jsonl", *rows)
    options = [
        "--image",
        CODE_IMAGE,
        "--isolation",
        "fresh",
        "--priority",
        "high",
        "--label",
        "who=me",
        "--label",
        "a=b=c",
    ]
    process = start(path, "--json", "--slots", "2", "--out", str(tmp_path / "out"), *options)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    first, second = (json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    assert first["labels"] == {"who": "me", "a": "b=c"}
    assert second["labels"] == {"who": "its own", "other": 1, "a": "b=c"}
    assert first["metrics"]["sandbox_uses"] == 1
    database = Database(f"sqlite:///{tmp_path / 'state' / 'evalpool.db'}")
    specs = Store(database).specs([first["job_id"], second["job_id"]])
    database.close()
    assert [spec.isolation for spec in specs.values()] == ["fresh", "warm"]
    assert {(spec.image, spec.priority) for spec in specs.values()} == {(CODE_IMAGE, "high")}
    client = docker.from_env()
    assert {first["image_digest"], second["image_digest"]} == {client.images.get(CODE_IMAGE).id}
    client.close()
    assert not list((tmp_path / "state" / "logs").iterdir())  # nothing failed


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


def children(pid: int, word: str) -> list[int]:
    """Return the child processes with this word among their arguments."""
    found = [Path(f"/proc/{child}/cmdline") for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [int(path.parent.name) for path in found if f"\0{word}\0" in path.read_text()]


def test_modules_and_commands_that_the_image_lacks_are_reported(tmp_path: Path) -> None:
    rows = [{"code": f"import nobody_has_it  # {n}"} for n in range(3)]
    rows += [{"code": f"nobody_has_it {n}", "tool": "shell_executor"} for n in range(3)]
    process = start(write(tmp_path / "jobs.jsonl", *rows), "--json", "--slots", "2")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    module, command = json.loads(out)["warnings"]
    lacking = "3 of 6 samples failed because the {} nobody_has_it is missing from the image evalpool/"
    assert module.startswith(lacking.format("module"))
    assert command.startswith(lacking.format("command"))
    assert module in err


def test_an_interrupted_run_that_cannot_be_resumed_cancels_its_other_jobs(tmp_path: Path) -> None:
    ledger = tmp_path / "state" / "evalpool.db"
    path = write(tmp_path / "jobs.jsonl", *({"code": f"import time; time.sleep(1)  # {n}"} for n in range(8)))
    process = start(path, "--slots", "2", "--force")
    eventually(lambda: ledger.exists() and finished(ledger) >= 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "were cancelled, since nothing could resume them" in err
    assert "cancelled" in verdicts(ledger)


def finished(database: Path) -> int:
    """Return the number of results in the ledger of a run."""
    return len(verdicts(database))


def verdicts(database: Path) -> list[str]:
    """Return the verdicts in the ledger of a run."""
    from sqlalchemy import create_engine
    from sqlalchemy.exc import OperationalError

    engine = create_engine(f"sqlite:///{database}")
    try:
        with engine.connect() as db:
            return list(db.exec_driver_sql("SELECT verdict FROM results").scalars())
    except OperationalError:  # not made yet
        return []
    finally:
        engine.dispose()
