"""Builds the documentation into site/, or into the folder that is given as an argument. `make docs` runs this.

The pages in docs/ link to source files, which a site generator does not accept. So the pages are first copied to a
temporary folder, together with a page for every file that they link to. There, lines such as `::: evalpool.submit_job`
become the documentation of what they name. Then Zensical builds the site in strict mode, and every link of the result
is checked.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import docstrings

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCE = PurePosixPath("source")
"""The folder of the site for pages that are not from docs/."""
FENCE = re.compile(r"^(```|~~~).*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
DIRECTIVE = re.compile(r"^::: (.+)$", re.MULTILINE)
SHIM = PurePosixPath("assets/worker.js")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"
LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
"""Elements that make a browser fetch something, and the attribute that names it. `link` is one, too, by its `rel`."""


class BuildError(Exception):
    """The site cannot be built, or is not whole."""


def page(path: Path) -> PurePosixPath:
    """The page of the site that shows a file or a folder of this checkout."""
    if path.is_relative_to(DOCS):
        return PurePosixPath(path.relative_to(DOCS))
    # Zensical passes over folders whose names begin with a dot
    inside = SOURCE.joinpath(*(part.lstrip(".") for part in path.relative_to(ROOT).parts))
    if path.is_dir():
        return inside / "index.md"
    # a browser shows text files, and downloads others
    return inside if path.suffix == ".md" else inside.with_name(f"{inside.name}.txt")


def copy(pages: Path) -> None:
    """Write all pages to a folder: those of docs/, and one for each file or folder that a page links to."""
    waiting = [*DOCS.rglob("*.md"), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    written: set[PurePosixPath] = set()
    while waiting:
        path = waiting.pop()
        place = page(path)
        if place in written:
            continue
        written.add(place)
        text, linked = text_of(path)
        waiting += linked
        (pages / place).parent.mkdir(parents=True, exist_ok=True)
        (pages / place).write_text(text)


def text_of(path: Path) -> tuple[str, list[Path]]:
    """The text of the page for a file or a folder, and the files that it links to."""
    if path.is_dir():
        inside = sorted(each for each in path.iterdir() if each.name[0] not in "._" and each.suffix != ".pyc")
        text = "\n".join(
            [f"# {path.relative_to(ROOT)}/", "", *(f"- [{each.name}]({each.name})" for each in inside), ""]
        )
        home, head = path, HIDDEN
    elif path.suffix == ".md":
        text, home = path.read_text(), path.parent
        head = "" if path.is_relative_to(DOCS) else HIDDEN
    else:
        return path.read_text(), []
    linked: list[Path] = []

    def leads(link: re.Match[str]) -> str:
        target, hash_, anchor = link[0].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        goal = Path(os.path.normpath(home / target))
        if not goal.exists() or not goal.is_relative_to(ROOT):
            raise BuildError(f"{path}: {link[0]} leads nowhere")
        linked.append(goal)
        return os.path.relpath(page(goal), page(path).parent) + hash_ + anchor

    parts, last = [], 0
    for fence_ in FENCE.finditer(text):
        parts += [LINK.sub(leads, text[last : fence_.start()]), fence_[0]]
        last = fence_.end()
    parts.append(LINK.sub(leads, text[last:]))
    return head + DIRECTIVE.sub(lambda line: docstrings.markdown(line[1]), "".join(parts)), linked


def build(site: Path) -> None:
    """Build the site into a folder, which is replaced as a whole if all is well."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        copy(home / "pages")
        shutil.copy(DOCS / "zensical.toml", home)
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(command, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise BuildError(COLOUR.sub("", done.stdout).partition("Traceback")[0])
        keep_local(home / "site")
        if problems := list(check(home / "site")):
            raise BuildError("\n".join(problems))
        shutil.rmtree(site, ignore_errors=True)
        shutil.move(home / "site", site)


def keep_local(site: Path) -> None:
    """Let pages load our own script where Zensical names one on the internet, which offline search needs."""
    shutil.copy(DOCS / "assets" / SHIM.name, site / "assets")
    for path in site.rglob("*.html"):
        ours = os.path.relpath(site / SHIM, path.parent)
        path.write_text(path.read_text().replace("https://unpkg.com/iframe-worker/shim", ours))


class Links(HTMLParser):
    """The anchors of a page, where it leads, and what a browser loads to show it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.leads: set[str] = set()
        self.loads: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.leads.add(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.add(given.get("href", ""))
        elif given.get(LOADS.get(tag, "")):
            self.loads.add(given[LOADS[tag]])


def check(site: Path) -> Iterator[str]:
    """What is wrong with a site: links and anchors that lead nowhere, and whatever is loaded from elsewhere."""
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    for path, links in pages.items():
        if path.name == "404.html":
            continue  # a server shows it in place of any page, so its links begin at the root
        name = path.relative_to(site)
        for target in sorted(links.leads | links.loads):
            if re.match(r"(https?:)?//", target):
                if target in links.loads:
                    yield f"{name} loads {target}"
            elif not target.startswith(("mailto:", "data:", "javascript:")):
                file, _, anchor = unquote(target).partition("#")
                goal = (path.parent / file).resolve() if file else path
                if goal.is_dir():
                    goal /= "index.html"
                if not goal.is_file():
                    yield f"{name}: {target} leads nowhere"
                elif anchor and goal in pages and anchor not in pages[goal].anchors:
                    yield f"{name}: {target} names a heading that does not exist"
    for sheet in site.rglob("*.css"):
        for target in re.findall(r"(?:@import\s*|url\()[\"']?((?:https?:)?//[^\"')]+)", sheet.read_text()):
            yield f"{sheet.relative_to(site)} loads {target}"


if __name__ == "__main__":
    goal = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    try:
        build(goal)
    except BuildError as error:
        sys.exit(f"docs: {error}")
    print(f"docs: open {os.path.relpath(goal)}/index.html")
