"""What importing the worker and the library loads, and how Celery finds its app."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

HEAVY = ("celery", "flower", "kombu", "redis")


def python(code: str, **env: str) -> str:
    """The output of a Python process of its own."""
    command = [sys.executable, "-c", code]
    given = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("slots", ["2", "many"])
@pytest.mark.parametrize("module", ["evalpool.worker", "evalpool.api.sandbox", "evalpool.worker.evaluation"])
def test_importing_the_worker_or_the_library_loads_no_queue_and_reads_no_settings(module: str, slots: str) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}} & {{*{HEAVY}}})"
    assert python(code, EVALPOOL_SLOTS=slots) == ""


def test_the_app_is_loaded_when_it_is_asked_for() -> None:
    assert python("from evalpool.worker import app; print(app.main)") == "evalpool"


@pytest.mark.parametrize(("app", "folder"), [("worker", ROOT), ("evalpool.worker", None)])
def test_celery_finds_the_app_in_a_checkout_and_elsewhere(app: str, folder: Path | None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "celery", "-A", app, "report"]
    env = os.environ if folder else os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder or tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "evalpool.high" in done.stdout
