"""`make docs` builds a site that is whole, needs no network, and documents everything public."""

import html
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import typer

import evalpool
from evalpool.api.cli import app
from tests.conftest import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run([sys.executable, DOCS / "build.py", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `docs/build.py`."""
    monkeypatch.syspath_prepend(DOCS)
    import build  # type: ignore[import-not-found]

    module: ModuleType = build
    return module


def text(page: Path) -> str:
    """What a page says, without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_every_page_is_in_the_navigation() -> None:
    config = (DOCS / "zensical.toml").read_text()
    tomllib.loads(config)
    listed = set(re.findall(r'"([\w/]+\.md)"', config))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | {
        "source/CHANGELOG.md",
        "source/CONTRIBUTING.md",
    }


def test_the_reference_has_every_public_name_and_every_command(site: Path) -> None:
    python = text(site / "reference" / "python.html")
    assert [name for name in evalpool.__all__ if name not in python] == []
    assert "The program." in python  # the docstring below a field
    commands = text(site / "reference" / "cli.html")
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for inner in getattr(command, "commands", {"": None}):
            assert f"Usage: evalpool {name} {inner}".strip() in commands


def test_source_files_are_part_of_the_site(site: Path) -> None:
    assert (site / "source" / "api" / "jobs.py.txt").read_text() == (ROOT / "api" / "jobs.py").read_text()
    assert 'href="source/api/jobs.py.txt"' in (site / "architecture.html").read_text()


def test_what_is_wrong_with_a_site_is_found(builder: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="there">There</h1>')
    (tmp_path / "style.css").write_text("@import url(https://example.org/font.css);")
    (tmp_path / "index.html").write_text(
        '<a href="other.html#there">right</a> <a href="https://example.org/">right</a> <a href="gone.html">wrong</a>'
        '<a href="other.html#gone">wrong</a> <script src="https://example.org/script.js"></script>'
        '<link rel="stylesheet" href="//example.org/style.css"> <link rel="canonical" href="https://example.org/">'
        '<img src="gone.png">'
    )
    assert sorted(builder.check(tmp_path)) == [
        "index.html loads //example.org/style.css",
        "index.html loads https://example.org/script.js",
        "index.html: gone.html leads nowhere",
        "index.html: gone.png leads nowhere",
        "index.html: other.html#gone names a heading that does not exist",
        "style.css loads https://example.org/font.css",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[gone](gone.md)", "leads nowhere"),
        ("[gone](../gone.py)", "leads nowhere"),
        ("[gone](index.md#gone)", "anchor does not exist"),
    ],
)
def test_a_broken_link_stops_the_build_and_leaves_the_old_site(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, problem: str
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "zensical.toml").write_text('[project]\nsite_name = "x"\ndocs_dir = "pages"\nsite_dir = "site"\n')
    (docs / "index.md").write_text(f"# Page\n\n{line}\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    (tmp_path / "CONTRIBUTING.md").write_text("# Contributing\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("old")
    monkeypatch.setattr(builder, "ROOT", tmp_path)
    monkeypatch.setattr(builder, "DOCS", docs)
    with pytest.raises(builder.BuildError, match=problem):
        builder.build(tmp_path / "site")
    assert (tmp_path / "site" / "index.html").read_text() == "old"
