"""The clock of SQLite after a reboot, on another machine, and in a container with its own boot id."""

import time
from pathlib import Path

import pytest

from evalpool.schemas import JobSpec, State, database
from evalpool.schemas.database import Database
from evalpool.schemas.fleet import Member
from evalpool.schemas.store import Store
from tests.schemas.test_recovery import ask, at_once, change

YEARS = 75 * 365 * 86400.0


def opened(folder: Path) -> Store:
    return Store(Database(f"sqlite:///{folder / 'ledger.db'}"))


def boot(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, offset: float = 0) -> None:
    """Pretend that the machine was booted with this id, and that its wall clock is wrong by so many seconds."""
    (folder / name).write_text(name)
    wall = time.clock_gettime
    monkeypatch.setattr(database, "BOOT_ID", folder / name)
    monkeypatch.setattr("evalpool.schemas.database.time.time", lambda: wall(time.CLOCK_REALTIME) + offset)


def test_nothing_waits_for_a_clock_that_was_years_ahead_before_the_last_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot(monkeypatch, tmp_path, "first", YEARS)
    store = opened(tmp_path)
    store.add_batch("b", [JobSpec(code="x")] * 2, None, None)
    store.add_batch("c", [JobSpec(code="x")], None, None)
    (lease, _) = store.claim(2, "dead", 5).leases
    store.put_back([lease], "dead", 1)
    store.report(Member(name="dead", images={"a:1": "sha256:1"}))
    change(store, "UPDATE batches SET todo = 'queueing' WHERE id = 'c'")
    store.database.close()

    boot(monkeypatch, tmp_path, "second")
    store = opened(tmp_path)
    change(store, "UPDATE clocks SET start = start + 60")  # a minute later
    assert store.fleet(15).members == ()
    assert store.abandoned() == ["c"]
    assert store.expire(3) == 1
    assert [store.state(f"b-{n:06}") for n in range(2)] == [State.QUEUED] * 2
    assert len(store.claim(9, "dead", 60).leases) == 3


def test_processes_with_another_boot_id_have_another_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot(monkeypatch, tmp_path, "here")
    here = opened(tmp_path)
    here.add_batch("b", [JobSpec(code="x")], None, None)
    here.claim(1, "w", 60)
    monkeypatch.setattr(database, "OFFSETS", tmp_path / "offsets")
    (tmp_path / "offsets").write_text("monotonic           0         0\nboottime       86400         0\n")
    since_boot = database.since_boot
    monkeypatch.setattr(database, "since_boot", lambda: since_boot() + 86400)
    there = opened(tmp_path)
    assert (there.expire(3), here.expire(3)) == (0, 0)
    there.renew({"b-000000": 1}, "w", 30)
    assert here.expire(3) == 0
    change(there, "UPDATE jobs SET lease_until = lease_until - 60")
    assert here.expire(3) == 1


def test_many_processes_that_open_a_database_at_once_agree_on_its_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot(monkeypatch, tmp_path, "first")
    opened(tmp_path).database.close()
    boot(monkeypatch, tmp_path, "second")
    assert at_once(*[lambda: opened(tmp_path).database.close()] * 8) == []
    assert ask(opened(tmp_path), "SELECT id, boot_id FROM clocks ORDER BY id") == [(1, "first"), (2, "second")]
