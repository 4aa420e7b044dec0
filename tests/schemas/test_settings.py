import secrets
from pathlib import Path

import pytest

from evalpool.schemas.database import Database
from evalpool.schemas.errors import SetupError
from evalpool.schemas.settings import Settings, settings


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for the checkout."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr("evalpool.schemas.settings.CHECKOUT", folder)
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EVALPOOL_SLOTS", "many"),
        ("EVALPOOL_SLOTS", "0"),
        ("EVALPOOL_REDIS_URL", "http://x"),
        ("EVALPOOL_LOG_FORMAT", "xml"),
        ("EVALPOOL_IMAGE", "bad image"),
        ("EVALPOOL_CODE_IMAGE", "-v"),
        ("EVALPOOL_NOTEBOOK_IMAGE", "a b"),
    ],
)
def test_a_wrong_value_is_rejected_with_the_name_of_the_setting(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=name):
        settings()


def test_settings_are_read_again_when_the_environment_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALPOOL_SLOTS", "3")
    assert settings().slots == 3
    monkeypatch.setenv("EVALPOOL_SLOTS", "4")
    assert settings().slots == 4
    assert settings() is settings()


def test_the_database_is_in_the_state_directory_unless_its_url_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_environment_overrides_the_named_file_which_overrides_that_of_the_checkout(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / ".env").write_text("EVALPOOL_SLOTS=5\nEVALPOOL_CHUNK=5\nEVALPOOL_MAX_USES=5\n")
    (tmp_path / "fleet.env").write_text("EVALPOOL_SLOTS=6\nEVALPOOL_CHUNK=6\n")
    monkeypatch.setenv("EVALPOOL_ENV_FILE", str(tmp_path / "fleet.env"))
    monkeypatch.setenv("EVALPOOL_SLOTS", "7")
    found = settings()
    assert (found.slots, found.chunk, found.max_uses) == (7, 6, 5)


def test_an_env_file_that_is_named_and_missing_is_reported_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALPOOL_ENV_FILE", "/nowhere/fleet.env")
    with pytest.raises(SetupError, match=r"EVALPOOL_ENV_FILE='/nowhere/fleet.env': there is no such file"):
        settings()


def test_an_env_file_that_is_not_text_is_rejected(checkout: Path) -> None:
    (checkout / ".env").write_bytes(b"EVALPOOL_SLOTS=\xff\n")
    with pytest.raises(SetupError, match="cannot be read"):
        Settings()


def test_without_a_redis_url_the_socket_of_the_user_or_the_machine_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, own = tmp_path / "machine.sock", tmp_path / "my state" / "redis" / "redis.sock"
    monkeypatch.setattr("evalpool.schemas.settings.MACHINE_SOCKET", machine)
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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("EVALPOOL_SLOT", "EVALPOOL_SLOTS"),
        ("EVALPOOL_REDISURL", "EVALPOOL_REDIS_URL"),
        ("evalpool_sluts", "EVALPOOL_SLOTS"),
    ],
)
def test_a_misspelt_setting_is_rejected_with_the_most_similar_name(
    name: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(SetupError, match=rf"{name} is not a setting of evalpool; did you mean {meant}\?"):
        settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EVALPOOL_SERVICE_HOST", "10.0.0.1"),
        ("EVALPOOL_SERVICE_PORT", "8000"),
        ("EVALPOOL_SERVICE_PORT_HTTP", "8000"),
        ("EVALPOOL_PORT", "tcp://10.0.0.1:8000"),
        ("EVALPOOL_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("EVALPOOL_REDIS_PORT_6379_TCP_ADDR", "10.0.0.1"),
        ("EVALPOOL_REDIS_SERVICE_HOST", "10.0.0.1"),
        ("EVALPOOL_SESSIONS", "4"),
    ],
)
def test_variables_of_kubernetes_and_of_later_versions_are_accepted(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes sets such variables in every container if a service is called evalpool or evalpool-redis."""
    monkeypatch.setenv(name, value)
    assert settings().slots > 0


def test_a_port_that_somebody_meant_as_a_setting_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALPOOL_REDIS_PORT", "6379")
    with pytest.raises(SetupError, match="EVALPOOL_REDIS_PORT is not a setting of evalpool"):
        settings()


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize("name", ["LEASE_SECONDS", "VISIBILITY_SECONDS", "DOCKER_TIMEOUT", "MAX_CPU_SECONDS"])
def test_a_setting_must_be_finite(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"EVALPOOL_{name}", value)
    with pytest.raises(SetupError, match=f"^EVALPOOL_{name}='{value}': "):
        settings()


def test_a_setting_that_resembles_no_other_is_rejected_with_the_page_that_lists_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVALPOOL_ZZZZ", "4")
    with pytest.raises(SetupError, match=r"EVALPOOL_ZZZZ is not a setting of evalpool; docs/configuration.md"):
        settings()


def test_a_misspelt_setting_in_a_file_is_rejected_with_the_name_of_the_file(checkout: Path) -> None:
    (checkout / ".env").write_text("EVALPOOL_SLOT=7\nPOSTGRES_PASSWORD=x\n")
    with pytest.raises(SetupError, match=rf"EVALPOOL_SLOT in {checkout}/.env .*EVALPOOL_SLOTS"):
        settings()


@pytest.mark.parametrize(
    ("given", "modules"),
    [
        ("numpy", ("numpy",)),
        ("numpy, pandas.api", ("numpy", "pandas.api")),
        ('["numpy", "json"]', ("numpy", "json")),
        ("[]", ()),
        ("", ()),
    ],
)
def test_a_list_may_be_given_with_commas_or_as_json(
    given: str, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALPOOL_PRELOAD", given)
    assert settings().preload == modules


SENTENCES = [
    ("EVALPOOL_PRELOAD", "numpy pandas", "'numpy pandas' is not a module name"),
    ("EVALPOOL_PRELOAD", '["numpy"', "it must be a list of names, separated by commas or as JSON"),
    ("EVALPOOL_PRELOAD", "[1]", "it must be a list of names, separated by commas or as JSON"),
    ("EVALPOOL_REDIS_URL", "http://x", "it must begin with redis://, rediss:// or unix://"),
    ("EVALPOOL_REDIS_URL", "redis://:secret@host:port/0", "its port is not a number"),
    ("EVALPOOL_REDIS_URL", "redis://host:6379/zero", "its database 'zero' is not a number"),
    ("EVALPOOL_DATABASE_URL", "mysql://me:secret@host/x", "it must begin with sqlite:///, postgresql:// or"),
    ("EVALPOOL_DATABASE_URL", "postgresql://me:secret@host:port/x", "its port is not a number"),
    ("EVALPOOL_DATABASE_URL", "sqlite://ledger.db", "write sqlite:////path/to/file"),
    ("EVALPOOL_DATABASE_URL", "sqlite://", "write sqlite:////path/to/file"),
    ("EVALPOOL_DATABASE_URL", "sqlite:///:memory:", "write sqlite:////path/to/file"),
    ("EVALPOOL_SLOTS", "many", "it must be a whole number"),
    ("EVALPOOL_SLOTS", "0", "it must be at least 1"),
    ("EVALPOOL_SLOTS", "1000", "it must be at most 256"),
    ("EVALPOOL_LEASE_SECONDS", "soon", "it must be a number"),
    ("EVALPOOL_REDIS_TIMEOUT", "0", "it must be greater than 0"),
    ("EVALPOOL_LOG_FORMAT", "xml", "it must be 'text' or 'json'"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), SENTENCES, ids=[f"{each[0]}={each[1]}" for each in SENTENCES])
def test_the_error_for_a_wrong_value_says_what_the_value_must_be(
    name: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SetupError) as raised:
        settings()
    told = str(raised.value)
    assert told.startswith(f"{name}=")
    assert sentence in told
    assert not any(word in told for word in ("secret", "pattern", "Input should", "validation error"))


@pytest.mark.parametrize("setting", ["EVALPOOL_STATE_DIR", "EVALPOOL_DATABASE_URL", "HOME"])
def test_no_folder_is_created_directly_below_the_root_folder(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(f"/evalpool-test-{secrets.token_hex(8)}")
    monkeypatch.delenv("EVALPOOL_STATE_DIR")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    given = f"sqlite:///{folder}/below/ledger.db" if setting == "EVALPOOL_DATABASE_URL" else str(folder)
    monkeypatch.setenv(setting, given)
    with pytest.raises(SetupError, match=rf"the folder {folder} does not exist.* create it"):
        Database(settings().store_url)
    assert not folder.exists()
