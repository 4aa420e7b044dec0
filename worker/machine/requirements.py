"""What is added to an image: Debian packages, and Python packages as wheels, each listed in a file.

pip runs on this machine and not in a container, because it is set up here for the package index that is in reach, and a
container may have no network. It takes only wheels, so nothing of a package is executed outside a sandbox, and a Python
of another version can install for the one of the image.
"""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from evalpool.schemas.errors import ImageBuildFailed, InvalidAddition

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""An architecture as Docker names it → as wheels name it."""
GLIBC = 36
"""The minor version of the C library in the images' Debian release; wheels for an older one run with it, too."""
OPTIONS = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--no-index", "--trusted-host", "--hash")
"""The options that a requirements file may have. Others make no sense in an image, or let pip build a package, which
executes it on this machine."""
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_NAME = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG = re.compile(rf"(?:[A-Za-z0-9.-]+:[0-9]+/)?{_NAME}(?:/{_NAME})*:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}")
_NAMED = re.compile(r"(?:satisfies the requirement|distribution found for|requirement:) '?([A-Za-z0-9][A-Za-z0-9._-]*)")


@dataclass(frozen=True)
class Entry:
    """One line of a file that lists packages."""

    path: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        """The file and the line, as compilers name them."""
        return f"{self.path}:{self.line}"

    @property
    def name(self) -> str:
        """The name of the Python package that the line asks for; empty if it is an option, a file or an address."""
        try:
            return canonicalize_name(Requirement(self.text).name)
        except InvalidRequirement:
            return ""


def entries(path: Path) -> list[Entry]:
    """Return the lines of a file without comments and empty lines; lines that end in a backslash are joined."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise InvalidAddition(f"{path} cannot be read: {why}. Name a file with one package per line.") from None
    found: list[Entry] = []
    begun, text = 0, ""
    for number, line in enumerate(lines, 1):
        begun = begun if text else number
        text += re.sub(r"(^|\s)#.*", "", line).strip()
        if text.endswith("\\"):
            text = text.removesuffix("\\")
            continue
        if text.strip():
            found.append(Entry(path, begun, text.strip()))
        text = ""
    if not found:
        raise InvalidAddition(f"{path} lists no package.")
    return found


def debian_packages(path: Path) -> list[Entry]:
    """Return the Debian packages that a file lists, one per line. Raises `InvalidAddition` for a line that is none."""
    found = entries(path)
    for entry in found:
        if not _PACKAGE.fullmatch(entry.text):
            raise InvalidAddition(f"{entry.place}: {entry.text!r} is not the name of a Debian package.")
    return found


def requirements(path: Path) -> list[Entry]:
    """Return the Python packages that a requirements file of pip lists. Raises `InvalidAddition` for a line that pip
    would not understand, or that has no place in an image."""
    found = entries(path)
    for entry in found:
        text = re.split(r"(?:^|\s)-", entry.text)[0].strip()
        _check_options(entry, entry.text.removeprefix(text))
        try:
            address = (Requirement(text).url if text else None) or ""
        except InvalidRequirement as error:
            if not text.endswith(".whl"):
                why = str(error).splitlines()[0]
                raise InvalidAddition(f"{entry.place}: {text!r} is not a requirement: {why}.") from None
            address = text
        parts = urlsplit(address)
        if address and (parts.scheme not in ("", "file", "http", "https") or not parts.path.endswith(".whl")):
            raise InvalidAddition(f"{entry.place}: {text!r} is not possible, as an image holds only wheels.")
    return [Entry(entry.path, entry.line, re.split(r"\s--", entry.text)[0].strip()) for entry in found]


def _check_options(entry: Entry, text: str) -> None:
    """Raise `InvalidAddition` for an option that is not allowed. pip reads these words as a shell does."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidAddition(f"{entry.place}: {entry.text!r} is not a requirement: {error}.") from None
    for word in words:
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        if name.startswith("-") and name not in OPTIONS:
            raise InvalidAddition(
                f"{entry.place}: {word!r} is not possible, as an image holds only wheels. The options that a file may "
                f"have are {', '.join(OPTIONS)}."
            )


def checked_tag(tag: str) -> str:
    """Return the name of an image, with `:latest` if it has no version. Raises `InvalidAddition` for one that Docker
    would refuse, or that belongs to a recipe of evalpool."""
    whole = tag if ":" in tag.rpartition("/")[2] else f"{tag}:latest"
    if not _TAG.fullmatch(whole):
        raise InvalidAddition(f"{tag!r} is not the name of an image: write it like lab/science:1, in small letters.")
    if whole.startswith("evalpool/"):
        raise InvalidAddition(f"{tag!r} is a name of evalpool's own images: choose another one, like lab/science:1.")
    return whole


def install(files: list[Path], target: Path, python: str, architecture: str) -> None:
    """Put the wheels that requirements files ask for, and what they depend on, into a folder. Raises `InvalidAddition`,
    which names the requirement that cannot be had."""
    if find_spec("pip") is None:
        raise ImageBuildFailed(f"Wheels need pip, which {sys.executable} lacks. Type: {sys.executable} -m ensurepip")
    machine = MACHINES.get(architecture, architecture)
    platforms = [f"manylinux_2_{minor}" for minor in range(GLIBC, 4, -1)] + ["manylinux2014", "manylinux2010", "linux"]
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", "--no-compile",
        "--only-binary=:all:", "--target", str(target), "--python-version", python, "--implementation", "cp",
        *(f"--platform={platform}_{machine}" for platform in platforms), *(f"--requirement={file}" for file in files),
    ]  # fmt: skip
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, umask=0o22)
    if run.returncode:
        known = [entry for file in files for entry in requirements(file)]
        raise InvalidAddition(_why(run.stderr, known, f"Python {python} on {machine}"))


def _why(said: str, known: list[Entry], where: str) -> str:
    """Return why pip has failed: the file and the line of the requirement that it names, if they can be found."""
    errors = [line for line in said.splitlines() if line.startswith("ERROR: ")] or said.splitlines()[-8:]
    reason = "\n".join(line.removeprefix("ERROR: ")[:400] for line in errors[:8])
    named = _NAMED.search(reason)
    if named is None:
        words = re.findall(r"[A-Za-z0-9][A-Za-z0-9._-]*", reason)  # as in "Cannot install a and b"
        names: set[str] = {canonicalize_name(word) for word in words}
        found = [entry for entry in known if entry.name in names]
        places = f"{', '.join(entry.place for entry in found)}: " if found else ""
        return f"{places}pip could not install the requirements:\n{reason}"
    name = canonicalize_name(named[1])
    entry = next((entry for entry in known if entry.name == name), None)
    if entry is None:
        return (
            f"{known[0].path}: one of the packages needs {named[1]}, of which there is no wheel for {where}:\n{reason}"
        )
    return (
        f"{entry.place}: there is no wheel of {entry.text} for {where}, or the package index is out of reach:\n{reason}"
    )
