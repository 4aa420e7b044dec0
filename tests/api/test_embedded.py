"""The private Redis and worker of a run: they start, are watched, and never outlive their owner."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from evalpool.api.embedded import _environment, _spawn, celery_command, embedded
from evalpool.api.receiver import in_thread
from evalpool.schemas import SetupError
from evalpool.schemas.settings import settings
from tests.conftest import ROOT, eventually

OWNER = """
import time
from evalpool.api.embedded import embedded
from evalpool.schemas.settings import settings
with embedded(settings()) as servers:
    print(servers.children[0].process.pid, flush=True)
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.redis
def test_a_private_redis_is_named_in_the_settings_and_gone_afterwards(redis_server: str) -> None:
    with embedded(settings(), slots=3) as servers:
        assert servers.private
        assert settings().slots == 3
        url = settings().queue_url
        with redis.Redis.from_url(url) as client:
            assert client.ping()
        with redis.Redis.from_url(url.replace(url[8:41], "")) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
        (child,) = servers.children
        assert url[9:41] not in Path(f"/proc/{child.process.pid}/cmdline").read_text()
        servers.check()
        assert "EVALPOOL_REDIS_URL" not in os.environ
    assert child.process.poll() is not None
    assert settings().redis_url is None


def test_a_child_has_the_settings_that_it_is_given_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALPOOL_DATABASE_URL", "sqlite:////nowhere")
    monkeypatch.setenv("evalpool_chunk", "7")
    monkeypatch.setenv("EVALPOOL_PRELOAD", "numpy,pandas")
    own = settings().model_copy(update={"database_url": None, "slots": 3, "redis_url": "redis://127.0.0.1:1/0"})
    given = {name: value for name, value in _environment(own).items() if name.upper().startswith("EVALPOOL_")}
    assert given == {
        "EVALPOOL_CHUNK": "7", "EVALPOOL_PRELOAD": '["numpy", "pandas"]', "EVALPOOL_SLOTS": "3",
        "EVALPOOL_REDIS_URL": "redis://127.0.0.1:1/0", "EVALPOOL_STATE_DIR": str(own.state_dir),
    }  # fmt: skip
    for name in [name for name in os.environ if name.upper().startswith("EVALPOOL_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert settings() == own


@pytest.mark.redis
async def test_coroutines_use_the_settings_of_their_run(redis_server: str) -> None:
    with embedded(settings()) as servers:
        assert await in_thread(lambda: settings().queue_url) == servers.settings.redis_url


def test_only_their_owner_can_read_logs_whatever_the_umask() -> None:
    before = os.umask(0)
    try:
        child = _spawn("worker", ["true"], settings(), signal.SIGTERM)
    finally:
        os.umask(before)
    child.process.wait(30)
    modes = [path.stat().st_mode & 0o777 for path in (child.log, child.log.parent, settings().state_dir)]
    assert modes == [0o600, 0o700, 0o700]


@pytest.mark.redis
@pytest.mark.parametrize("failure", [None, KeyboardInterrupt(), SetupError("it failed")])
def test_logs_are_kept_only_if_something_failed(redis_server: str, failure: BaseException | None) -> None:
    with suppress(SetupError, KeyboardInterrupt), embedded(settings()) as servers:
        (child,) = servers.children
        assert child.log.exists()
        if failure is not None:
            raise failure
    assert child.log.exists() is isinstance(failure, SetupError)


@pytest.mark.redis
def test_each_private_run_is_a_fleet_of_its_own(redis_server: str) -> None:
    names = set()
    for _ in range(2):
        with embedded(settings()):
            names.add(settings().fleet)
    assert len(names - {None}) == 2
    assert settings().fleet is None


def test_a_configured_redis_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALPOOL_REDIS_URL", "redis://127.0.0.1:1/0")
    with embedded(settings()) as servers:
        servers.start_worker()
        servers.check()
        assert not servers.private
        assert servers.children == []


def test_a_machine_without_redis_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalpool.api.embedded.redis_binary", lambda: None)
    with pytest.raises(SetupError, match="apt-get install redis-server"), embedded(settings()):
        pass


@pytest.mark.redis
def test_a_dead_child_is_reported_with_the_end_of_its_log(redis_server: str) -> None:
    with embedded(settings()) as servers:
        command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
        servers.children.append(_spawn("worker", command, settings(), signal.SIGTERM))
        servers.children[-1].process.wait(30)
        with pytest.raises(SetupError, match=r"(?s)worker of this run ended with exit code 3.*the reason"):
            servers.check()


@pytest.mark.redis
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_private_redis_dies_with_its_owner(redis_server: str, how: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, cwd=ROOT)
    assert owner.stdout is not None
    with owner.stdout as out:
        pid = int(out.readline())
    assert alive(pid)
    owner.send_signal(how)
    owner.wait(30)
    eventually(lambda: not alive(pid))


def test_celery_starts_our_worker_even_beside_modules_of_the_same_names(tmp_path: Path) -> None:
    for name in ("worker", "schemas", "api"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    done = subprocess.run(
        celery_command("report"), cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "the wrong module" not in done.stdout + done.stderr
