"""Images without Python: `docker exec` is slower, but keeps the same limits and gives the same verdicts."""

import asyncio
import threading
from collections.abc import Callable

import docker
import pytest

from evalpool.api import submit_batch
from evalpool.schemas import Case, JobSpec, Limits, Verdict
from evalpool.worker.machine import images
from evalpool.worker.sandbox.engine import Engine
from evalpool.worker.sandbox.exec import ExecBox
from tests.conftest import PATIENCE, WorkerProcess, containers, eventually
from tests.sandbox.conftest import SHAPE
from tests.sandbox.test_contract import python

pytestmark = [pytest.mark.docker, pytest.mark.redis]

IMAGE = "evalpool/busybox:1"


@pytest.fixture(scope="module")
def busybox(engine_client: docker.DockerClient) -> str:
    images.build("busybox", if_missing=True, say=lambda _: None)
    return IMAGE


def test_shell_jobs_have_the_same_limits_and_verdicts(
    busybox: str, start_worker: Callable[..., WorkerProcess], engine_client: docker.DockerClient
) -> None:
    worker = start_worker()
    jobs = {
        "plain": (JobSpec(code='read x; echo "$1 $x $Y"', stdin="b\n", args=["a"], env={"Y": "c"}), Verdict.PASSED),
        "files": (JobSpec(code="cat d/f", files={"d/f": "data"}, cases=[Case("", "data")]), Verdict.PASSED),
        "wrong": (JobSpec(code="cat", cases=[Case("1", "1"), Case("2", "3")]), Verdict.WRONG_ANSWER),
        "exit": (JobSpec(code="exit 3"), Verdict.RUNTIME_ERROR),
        "odd": (JobSpec(code="exit 200"), Verdict.RUNTIME_ERROR),
        "holder": (JobSpec(code="sleep 1000 & echo done", limits=Limits(wall_seconds=30)), Verdict.PASSED),
        "signal": (JobSpec(code="kill -SEGV $$"), Verdict.RUNTIME_ERROR),
        "slow": (
            JobSpec(code="while :; do :; done", limits=Limits(cpu_seconds=0.5, wall_seconds=60)),
            Verdict.TIME_LIMIT,
        ),
        "sleepy": (JobSpec(code="sleep 1000", limits=Limits(wall_seconds=1)), Verdict.TIME_LIMIT),
        "greedy": (
            JobSpec(code="x=xxxx; while :; do x=$x$x; done", limits=Limits(memory_mib=32)),
            Verdict.MEMORY_LIMIT,
        ),
        "loud": (JobSpec(code="yes"), Verdict.OUTPUT_LIMIT),
        "forks": (JobSpec(code="f() { f | f & }; f; sleep 5", limits=Limits(wall_seconds=3)), None),
        "nobody": (JobSpec(code="test $(id -u) -gt 1000 && ! touch /x && ! touch /usr/bin/x"), Verdict.PASSED),
    }
    batch = submit_batch(
        [spec.model_copy(update={"task_id": name, "tool": "shell_executor", "image": busybox})
         for name, (spec, _) in jobs.items()]
    )  # fmt: skip
    results = {result.task_id: result for result in batch.as_completed(timeout=PATIENCE)}
    assert results["plain"].stdout == "a b c\n", results["plain"]
    for name, (_, verdict) in jobs.items():
        assert results[name].verdict is not Verdict.SANDBOX_ERROR, results[name]
        assert verdict in (None, results[name].verdict), (name, results[name])
    assert results["odd"].exit_code == 200
    assert results["signal"].signal == 11
    assert results["holder"].metrics.wall_seconds < 20
    assert results["greedy"].metrics.oom_killed
    assert 0.5 <= results["slow"].metrics.cpu_seconds < 1
    assert worker.log.read_text().count("action=no_agent") == 1  # the log says so once
    assert worker.stop() == 0
    eventually(lambda: not containers(engine_client, worker.pid))


async def test_limits_hold_while_the_engine_does_not_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(engine, "exit_code", lambda _: answers.wait(PATIENCE))
    box = ExecBox(SHAPE, engine)
    await box.start()
    try:
        program = python("while True: pass", limits=Limits(cpu_seconds=1, wall_seconds=60))
        spin = ["python3", "-c", "while True: pass"]  # no file is written, which would need the exit code
        outcome = await asyncio.wait_for(box._exec(spin, {}, b"", program), PATIENCE)
    finally:
        answers.set()
        await box.close()
    assert outcome.ended == "cpu"
