"""Whole notebooks as queued jobs, each from a clean start."""

import json
from collections.abc import Callable

import docker
import pytest
from docker.errors import ImageNotFound

from evalpool.api import submit_batch
from evalpool.schemas import Case, InvalidJob, JobSpec, Verdict
from tests.conftest import PATIENCE, WorkerProcess, missing

pytestmark = [pytest.mark.docker, pytest.mark.redis]

IPYNB = {
    "cells": [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["x = 20\n", "x"]},
        {"cell_type": "code", "source": "x + 1"},
    ]
}
PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"


def test_notebooks_run_as_jobs(start_worker: Callable[..., WorkerProcess], engine_client: docker.DockerClient) -> None:
    try:
        engine_client.images.get("evalpool/notebook:3.11")
    except ImageNotFound:
        missing("no image evalpool/notebook:3.11 here")
    start_worker()
    jobs = {
        "cells": ("x = 1\nprint('one')\n# %%\nx + 1", Verdict.PASSED, "one\nResult: 2\n"),
        "clean": ("'x' in globals()", Verdict.PASSED, "Result: False\n"),
        "file": (json.dumps(IPYNB), Verdict.PASSED, "Result: 20\nResult: 21\n"),
        "error": ("print(1)\n# %%\n1/0\n# %%\nprint(2)", Verdict.RUNTIME_ERROR, "1\n"),
        "endless": ("while True: pass", Verdict.TIME_LIMIT, ""),
    }
    specs = [JobSpec(code=code, tool="notebook_executor", task_id=name) for name, (code, _, _) in jobs.items()]
    specs.append(JobSpec(code=PLOT, tool="notebook_executor", task_id="plot"))
    specs.append(
        JobSpec(code="int(input()) * 2", tool="notebook_executor", cases=[Case("4", "Result: 8")], task_id="case")
    )
    batch = submit_batch(specs)
    batch.wait(timeout=PATIENCE)
    results = {result.task_id: result for result in batch.results()}
    for name, (_, verdict, stdout) in jobs.items():
        assert (results[name].verdict, results[name].stdout) == (verdict, stdout), results[name]
    assert results["plot"].stdout.startswith("[image/png, ")
    assert results["case"].verdict is Verdict.PASSED
    assert "ZeroDivisionError" in results["error"].stderr


def test_a_notebook_cannot_have_a_check() -> None:
    with pytest.raises(InvalidJob, match="check"):
        JobSpec(code="x = 1", tool="notebook_executor", check="assert x == 1")
