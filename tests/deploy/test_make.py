"""The targets of the Makefile, and where `make up` writes the passwords, tested with a stand-in for Docker Compose."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    return tmp_path


def make(checkout: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    # The tests themselves may be run by make, and this one must not take itself for a part of that.
    of_make = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")
    env = {name: value for name, value in os.environ.items() if name not in of_make}
    return subprocess.run(["make", *words], cwd=checkout, capture_output=True, text=True, umask=0, env=env)


def up(checkout: Path) -> "subprocess.CompletedProcess[str]":
    return make(checkout, "up", "COMPOSE=echo")


def test_passwords_are_made_once_in_a_file_that_only_its_owner_can_read(checkout: Path) -> None:
    assert up(checkout).stdout == "up -d --build\n"
    made = (checkout / ".env").read_text()
    assert re.fullmatch(r"POSTGRES_PASSWORD=[0-9a-f]{32}\nFLOWER_PASSWORD=[0-9a-f]{32}\n", made)
    assert (checkout / ".env").stat().st_mode & 0o777 == 0o600
    assert up(checkout).returncode == 0
    assert (checkout / ".env").read_text() == made


def test_a_file_that_others_could_read_becomes_private_and_keeps_its_lines(checkout: Path) -> None:
    (checkout / ".env").write_text("EVALPOOL_SLOTS=4")
    (checkout / ".env").chmod(0o644)
    assert up(checkout).returncode == 0
    assert (checkout / ".env").read_text().startswith("EVALPOOL_SLOTS=4\nPOSTGRES_PASSWORD=")
    assert (checkout / ".env").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_refused_and_its_target_is_not_written(checkout: Path, there: bool) -> None:
    goal = checkout / "elsewhere"
    if there:
        goal.write_text("")
    (checkout / ".env").symlink_to(goal)
    done = up(checkout)
    assert done.returncode != 0
    assert "not a link" in done.stderr
    assert done.stdout == ""
    assert not goal.exists() or goal.read_text() == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_file_of_another_user_is_refused(checkout: Path) -> None:
    (checkout / ".env").touch()
    os.chown(checkout / ".env", 65534, 65534)
    done = up(checkout)
    assert done.returncode != 0
    assert ".env must be a regular file that belongs to root" in done.stderr
    assert (checkout / ".env").read_text() == ""


def test_every_target_is_phony_and_described(checkout: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z]+):", makefile, re.MULTILINE)
    phony = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert sorted(phony[0].split()) == sorted(targets)
    assert [line.split()[1] for line in make(checkout, "help").stdout.splitlines()] == targets
