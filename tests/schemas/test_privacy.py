import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalpool.schemas.database import Database
from evalpool.schemas.errors import SetupError
from evalpool.schemas.privacy import private_file, private_folder


@pytest.fixture(params=[0o000, 0o022, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: mode(path) for path in folder.iterdir()}


def test_a_new_database_and_its_new_folders_are_private(umask: None, tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/a/b/evalpool.db")
    with database.write() as db:
        db.exec_driver_sql("CREATE TABLE t (x)")
        found = modes(tmp_path / "a" / "b")
    database.close()
    assert found == dict.fromkeys(("evalpool.db", "evalpool.db-wal", "evalpool.db-shm"), 0o600)
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o700, 0o700)


def test_an_existing_database_becomes_private_and_its_folder_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    first = Database(f"sqlite:///{tmp_path}/x.db")
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    assert len(modes(tmp_path)) == 3
    second = Database(f"sqlite:///{tmp_path}/x.db")
    assert set(modes(tmp_path).values()) == {0o600}
    assert mode(tmp_path) == 0o755
    first.close()
    second.close()


def test_another_database_object_does_not_drop_the_locks_of_the_first(tmp_path: Path) -> None:
    """SQLite's locks belong to the process, and closing any descriptor of the file drops them all."""
    first = Database(f"sqlite:///{tmp_path}/x.db")

    def locks() -> int:
        return Path("/proc/locks").read_text().count(f" {os.getpid()} ")

    with first.write() as db:
        db.exec_driver_sql("CREATE TABLE t (x)")
        held = locks()
        private_file(tmp_path / "x.db")
        private_file(tmp_path / "x.db-wal")
        assert locks() == held > 0
    first.close()


def test_a_database_with_a_uri_is_created_where_the_uri_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Database("sqlite:///file:x.db?uri=true").close()
    assert [path.name for path in tmp_path.iterdir()] == ["x.db"]


def test_a_folder_that_cannot_be_created_is_reported_in_one_sentence() -> None:
    with pytest.raises(SetupError, match=r"the database /dev/null/x/y.db cannot be created .*EVALPOOL_DATABASE_URL"):
        Database("sqlite:////dev/null/x/y.db")


def test_an_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    private_folder(tmp_path)
    private_file(tmp_path / "new" / "file")
    assert (mode(tmp_path), mode(tmp_path / "new"), mode(tmp_path / "new" / "file")) == (0o750, 0o700, 0o600)
