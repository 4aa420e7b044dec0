from pathlib import Path

import pytest

from schemas.errors import SetupError
from schemas.settings import Settings, settings


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for the checkout."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr("schemas.settings.CHECKOUT", folder)
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EVALPOOL_SLOTS", "many"),
        ("EVALPOOL_SLOTS", "0"),
        ("EVALPOOL_REDIS_URL", "http://x"),
        ("EVALPOOL_LOG_FORMAT", "xml"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=name):
        settings()


def test_a_changed_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALPOOL_SLOTS", "3")
    assert settings().slots == 3
    monkeypatch.setenv("EVALPOOL_SLOTS", "4")
    assert settings().slots == 4
    assert settings() is settings()


def test_the_database_lies_in_the_state_directory_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALPOOL_STATE_DIR", "/somewhere")
    assert settings().store_url == "sqlite:////somewhere/evalpool.db"
    monkeypatch.setenv("EVALPOOL_DATABASE_URL", "postgresql://u:p@h/d")
    assert settings().store_url == "postgresql+psycopg://u:p@h/d"


def test_an_env_file_in_the_working_directory_is_not_read(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("EVALPOOL_DATABASE_URL=postgresql://stranger/x\n")
    monkeypatch.chdir(tmp_path)
    assert Settings().database_url is None


def test_the_env_file_of_the_checkout_is_read_from_any_working_directory(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / ".env").write_text("EVALPOOL_SLOTS=7\nPOSTGRES_PASSWORD=x\n")
    monkeypatch.chdir(tmp_path)
    assert Settings().slots == 7
    (checkout / "pyproject.toml").unlink()  # then it is a folder of installed packages
    assert "slots" not in Settings().model_fields_set


def test_the_named_file_wins_over_the_checkouts_and_the_environment_over_both(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / ".env").write_text("EVALPOOL_SLOTS=5\nEVALPOOL_CHUNK=5\nEVALPOOL_MAX_USES=5\n")
    (tmp_path / "fleet.env").write_text("EVALPOOL_SLOTS=6\nEVALPOOL_CHUNK=6\n")
    monkeypatch.setenv("EVALPOOL_ENV_FILE", str(tmp_path / "fleet.env"))
    monkeypatch.setenv("EVALPOOL_SLOTS", "7")
    found = settings()
    assert (found.slots, found.chunk, found.max_uses) == (7, 6, 5)


def test_a_missing_named_file_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALPOOL_ENV_FILE", "/nowhere/fleet.env")
    with pytest.raises(SetupError, match=r"EVALPOOL_ENV_FILE='/nowhere/fleet.env': there is no such file"):
        settings()


def test_a_file_that_is_not_text_is_refused(checkout: Path) -> None:
    (checkout / ".env").write_bytes(b"EVALPOOL_SLOTS=\xff\n")
    with pytest.raises(SetupError, match="cannot be read"):
        Settings()


def test_without_a_named_redis_the_socket_of_the_user_or_the_machine_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, own = tmp_path / "machine.sock", tmp_path / "my state" / "redis" / "redis.sock"
    monkeypatch.setattr("schemas.settings.MACHINE_SOCKET", machine)
    monkeypatch.setenv("EVALPOOL_STATE_DIR", str(tmp_path / "my state"))
    assert settings().queue_url == settings().broker_url == "redis://localhost:6379/0"
    machine.touch()
    assert settings().queue_url == f"unix://{machine}?db=0"
    assert settings().broker_url == f"redis+socket://{machine}?virtual_host=0"
    own.parent.mkdir(parents=True)
    own.touch()
    assert settings().queue_url == f"unix://{tmp_path}/my%20state/redis/redis.sock?db=0"
    monkeypatch.setenv("EVALPOOL_REDIS_URL", "redis://named/1")
    assert settings().queue_url == settings().broker_url == "redis://named/1"


@pytest.mark.parametrize(
    ("given", "celerys"),
    [
        ("unix:///a/b.sock", "redis+socket:///a/b.sock?virtual_host=0"),
        ("unix:///a/b.sock?db=3", "redis+socket:///a/b.sock?virtual_host=3"),
        ("unix://me:p%40ss@/a/b.sock?db=3", "redis+socket://me:p%40ss@/a/b.sock?virtual_host=3"),
        ("unix:///a/b.sock?password=p%40ss&db=1", "redis+socket://:p%40ss@/a/b.sock?virtual_host=1"),
        ("rediss://host:1/2", "rediss://host:1/2"),
    ],
)
def test_the_url_of_a_socket_is_translated_for_celery(
    given: str, celerys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALPOOL_REDIS_URL", given)
    assert (settings().queue_url, settings().broker_url) == (given, celerys)
