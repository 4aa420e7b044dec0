import pytest

from schemas.errors import SetupError
from schemas.settings import settings


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
