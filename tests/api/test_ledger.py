"""The commands for the database: `upgrade` migrates an older one, and `check` repairs inconsistent rows."""

from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text

from evalpool.api.cli import main
from evalpool.schemas import JobSpec, SchemaMismatch
from evalpool.schemas.database import MIGRATIONS, Database
from evalpool.schemas.settings import settings
from evalpool.schemas.store import Store


def older(path: Path) -> str:
    """A database of the previous version, with a batch of two jobs, one of them finished."""
    url = f"sqlite:///{path}"
    engine = create_engine(url)
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "0004")
        connection.execute(text("INSERT INTO batches (id, total, created_at) VALUES ('b', 2, 1)"))
        for n, state in enumerate(("finished", "queued")):
            connection.execute(
                text(
                    "INSERT INTO jobs (id, batch_id, seq, spec, priority, rank, state, attempt, created_at) VALUES "
                    f"""('b-{n:06}', 'b', {n}, '{{"code": "x"}}', 'normal', {n}, '{state}', 0, 1)"""
                )
            )
        connection.execute(
            text(
                "INSERT INTO results (job_id, batch_id, verdict, stdout, stderr, stdout_truncated, stderr_truncated, "
                "detail, wall_seconds, cpu_seconds, peak_memory_bytes, oom_killed, processes_peak, output_bytes, "
                "queue_seconds, setup_seconds, sandbox_uses, attempt, finished_at) VALUES "
                "('b-000000', 'b', 'passed', 'hi', '', 0, 0, '', 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2)"
            )
        )
    engine.dispose()
    return url


def revision(url: str) -> str:
    engine = create_engine(url)
    with engine.connect() as connection:
        found = str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar())
    engine.dispose()
    return found


def test_opening_a_shared_database_does_not_upgrade_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = older(tmp_path / "old.db")
    monkeypatch.setenv("EVALPOOL_DATABASE_URL", url)
    with pytest.raises(SchemaMismatch, match="evalpool db upgrade"):
        Database(url)
    with pytest.raises(SystemExit) as ended:
        main(["status", "b"])
    assert ended.value.code == 1
    assert "evalpool db upgrade" in capsys.readouterr().err
    assert revision(url) == "0004"


def test_the_upgrade_command_keeps_existing_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = older(tmp_path / "old.db")
    monkeypatch.setenv("EVALPOOL_DATABASE_URL", url)
    for said in ("it had 0004 before", "already"):
        with pytest.raises(SystemExit) as ended:
            main(["db", "upgrade"])
        assert ended.value.code == 0
        assert said in capsys.readouterr().out
    store = Store(Database(url))
    assert (store.progress("b").finished, store.progress("b").queued) == (1, 1)
    assert [result.stdout for result in store.batch_results("b")] == ["hi"]
    assert [lease.spec for lease in store.claim(9, "w", 60).leases] == [JobSpec(code="x")]
    store.database.close()


def test_the_default_database_is_upgraded_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVALPOOL_STATE_DIR", str(tmp_path))
    older(tmp_path / "evalpool.db")
    with pytest.raises(SystemExit) as ended:
        main(["status", "b"])
    assert ended.value.code == 0
    assert "finished" in capsys.readouterr().out
    assert revision(settings().store_url) != "0004"


def test_the_check_command_says_what_it_repaired(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.add_batch("b", [JobSpec(code="x")] * 3, None, None)
    with store.database.write() as db:
        db.execute(text("UPDATE jobs SET state = 'finished'"))
    codes = []
    for arguments in (["--dry-run"], [], []):
        with pytest.raises(SystemExit) as ended:
            main(["db", "check", *arguments])
        codes.append(ended.value.code)
    assert codes == [1, 0, 0]
    seen, repaired, sound = capsys.readouterr().out.splitlines()
    assert seen == "3 jobs have ended without a result: nothing was changed (b-000000, b-000001, b-000002)"
    assert repaired == "3 jobs have ended without a result: they are run again (b-000000, b-000001, b-000002)"
    assert sound == "all rows are consistent"
    assert len(store.claim(9, "w", 60).leases) == 3
