"""The images of sandboxes: recipes in `images/`, built on the machine that needs them.

A recipe is built in one of two ways, which give the same file tree. If its base image is in the engine or in a registry
within reach, the recipe is an ordinary Dockerfile. Many evaluation hosts reach no registry but, like any Debian
machine, have a Debian mirror: there, `images/from-debian` unpacks the same packages, and the engine imports the result.
Python packages come as wheels from a package index and are a layer on top. People can add packages of both kinds to a
recipe, and get an image with a name of their own.
"""

import argparse
import hashlib
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import docker
from docker.errors import APIError, BuildError, DockerException, ImageNotFound
from pydantic import BaseModel, ConfigDict, ValidationError
from requests.exceptions import RequestException

from evalpool.schemas.errors import ImageBuildFailed, InvalidAddition, NoSuchRecipe
from evalpool.worker.machine import requirements
from evalpool.worker.machine.requirements import Entry
from evalpool.worker.sandbox.engine import silent

RECIPE_LABEL = "org.evalpool.recipe"  # hash of the recipe's files: tells a stale image from a current one
PYTHON_LABEL = "org.evalpool.python"
TOOLCHAINS_LABEL = "org.evalpool.toolchains"  # names, with commas between them
VERSIONS_LABEL = "org.evalpool.versions"  # JSON: toolchain → its tool and version; or library → its own

_HERE = Path(__file__).resolve().parent
_PLACES = (_HERE.parents[1] / "images", _HERE / "recipes")  # a checkout, an installed wheel
_PROBE_SECONDS = 4  # a registry that needs longer would not help
_BUILD_SECONDS = 900
_FOR_WHEELS = ("libstdc++6", "libgomp1", "zlib1g")  # what wheels may expect of any Linux, and no other package brings
_CHECK = """\
import importlib, importlib.metadata as metadata, json, sys
versions = {}
for name in sys.argv[1:]:
    own = metadata.distribution(name)
    versions[name] = f"{name} {own.version}"
    for module, names in metadata.packages_distributions().items():
        if own.metadata["Name"] in names and module.isidentifier() and not module.startswith("_"):
            try:
                importlib.import_module(module)
            except Exception as error:
                print(f"warning: `import {module}` fails: {type(error).__name__}: {error}", file=sys.stderr)
print(json.dumps(versions))
"""
"""The check of an image with additions: tries to import what was asked for, and prints the versions."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Image:
    """An image on this engine that came from a recipe."""

    tag: str
    id: str
    size_bytes: int
    created: datetime
    python: str | None
    toolchains: dict[str, str]
    """Name → its tool and version; also the libraries of an image that is made for them."""

    @property
    def languages(self) -> str:
        """The languages that the image runs besides shell, as a text for people."""
        tools = ({"python": f"python {self.python}"} if self.python else {}) | self.toolchains
        named = (tool if tool.startswith(f"{name} ") else f"{name} ({tool})" for name, tool in tools.items())
        return ", ".join(named) or "shell only"


class _Recipe(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path
    tag: str
    suite: str
    packages: list[str]
    python: str | None = None
    check: list[str] = []
    """The command that checks the image. It gets the names of the toolchains as arguments, and prints versions as
    JSON."""
    toolchains: dict[str, list[str]] = {}
    """Name → packages, in addition to those that every such image has."""
    prune: list[str] = []
    """Names of folders that wheels have and the image does not need."""
    apt: tuple[Entry, ...] = ()
    """Debian packages that somebody has added."""
    pip: tuple[Path, ...] = ()
    """Requirements files: of the recipe, and of somebody who has added packages."""
    own: bool = False
    """Whether somebody has made it another image, with a name of its own."""

    def without(self, names: Collection[str]) -> "_Recipe":
        unknown = [name for name in names if name not in self.toolchains]
        if unknown:
            known = ", ".join(self.toolchains) or "none"
            raise NoSuchRecipe(f"{self.tag} has no toolchain {', '.join(unknown)}. Its toolchains are: {known}.")
        kept = {name: packages for name, packages in self.toolchains.items() if name not in names}
        return self.model_copy(update={"toolchains": kept})

    def extended(self, tag: str | None, apt: Path | None, pip: Path | None) -> "_Recipe":
        if tag is None:
            if apt or pip:
                raise InvalidAddition(
                    "An image with added packages needs a name of its own. Choose one with --tag, for example "
                    "--tag lab/science:1."
                )
            return self
        if self.python is None and pip:
            raise InvalidAddition(f"{self.tag} has no Python that could use the packages of {pip}.")
        wheels = (*self.pip, pip) if pip else self.pip
        for path in wheels:
            requirements.requirements(path)
        added = tuple(requirements.debian_packages(apt)) if apt else ()
        changes = {"tag": requirements.checked_tag(tag), "apt": added, "pip": wheels, "own": True}
        return self.model_copy(update=changes)

    @property
    def all_packages(self) -> list[str]:
        added = [entry.text for entry in self.apt]
        wheels = _FOR_WHEELS if self.pip else ()
        return list(dict.fromkeys([*self.packages, *itertools.chain(*self.toolchains.values()), *wheels, *added]))

    @property
    def requested(self) -> list[str]:
        """The Python packages that somebody has added."""
        return [entry.name for entry in requirements.requirements(self.pip[-1]) if entry.name] if self.pip else []

    @property
    def labels(self) -> dict[str, str]:
        files = [self.folder.parent / "from-debian", *sorted(path for path in self.folder.rglob("*") if path.is_file())]
        if self.pip:
            files += [self.folder.parent / "with-wheels", *self.pip]
        sums = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
        names = ",".join(self.toolchains)
        added = [entry.text for entry in self.apt]
        digest = hashlib.sha256("\n".join([*sums, *filter(None, [names]), *added]).encode()).hexdigest()
        labels = {RECIPE_LABEL: digest, PYTHON_LABEL: self.python or "", TOOLCHAINS_LABEL: names}
        return {key: value for key, value in labels.items() if value}

    def dockerfile(self, *instructions: str) -> list[str]:
        lines = (self.folder / "Dockerfile").read_text().splitlines()
        return [line for line in lines if line.partition(" ")[0] in instructions]

    @property
    def base(self) -> str:
        return self.dockerfile("FROM")[0].split()[1]


def recipes() -> list[str]:
    """Return the names of the recipes."""
    return sorted({path.parent.name for place in _PLACES for path in place.glob("*/recipe.toml")})


def installed() -> list[Image]:
    """Return the images that were built on this engine, whether or not their recipes have changed since."""
    with _engine() as engine:
        found = engine.api.images(filters={"label": RECIPE_LABEL})
    images = [
        Image(
            tag,
            image["Id"],
            image["Size"],
            datetime.fromtimestamp(image["Created"], UTC),
            image["Labels"].get(PYTHON_LABEL),
            json.loads(image["Labels"].get(VERSIONS_LABEL, "{}")),
        )
        for image in found
        for tag in image["RepoTags"] or []
        if tag != "<none>:<none>"
    ]
    return sorted(images, key=lambda image: image.tag)


def build(
    recipe: str = "python",
    *,
    tag: str | None = None,
    apt: Path | None = None,
    pip: Path | None = None,
    without: Collection[str] = (),
    if_missing: bool = False,
    say: Say,
) -> str:
    """Build a recipe and return the image's id. With a `tag`, the image gets this name and, in addition to what the
    recipe says, the Debian packages in the file `apt` and the Python packages in the requirements file `pip`. The tag
    moves to the new image only after that has passed its check."""
    wanted = _read(recipe).without(without).extended(tag, apt, pip)
    with _engine() as engine:
        present = None
        with suppress(ImageNotFound):
            present = engine.images.get(wanted.tag)
        if if_missing and present:
            if present.labels.get(RECIPE_LABEL) == wanted.labels[RECIPE_LABEL]:
                say(f"ok ({wanted.tag}, {present.attrs['Size'] / 1e6:.0f} MB)")
                return str(present.id)
            say(f"{wanted.tag} was built from an older recipe")

        begun = time.monotonic()
        tree_id = _make(engine, wanted, say)
        if wanted.pip:
            tree_id = _with_wheels(engine, wanted, tree_id, say)
        versions = _check(engine, wanted, tree_id, say)
        image_id = _labelled(engine, tree_id, wanted.labels | versions)
        repository, _, version = wanted.tag.rpartition(":")
        engine.api.tag(image_id, repository, version)
        size = engine.images.get(image_id).attrs["Size"]
        say(f"{wanted.tag} built in {time.monotonic() - begun:.0f} s, {size / 1e6:.0f} MB")

        if present and present.id != image_id:
            with suppress(APIError):  # a running sandbox uses it, or somebody has given it a name
                if not engine.images.get(str(present.id)).tags:
                    engine.images.remove(str(present.id))
        return image_id


def _read(name: str) -> _Recipe:
    folder = next((place / name for place in _PLACES if (place / name / "recipe.toml").is_file()), None)
    if folder is None:
        raise NoSuchRecipe(f"There is no recipe {name!r}. There are: {', '.join(recipes()) or 'none'}.")
    wheels = [path for path in [folder / "requirements.txt"] if path.is_file()]
    try:
        return _Recipe(folder=folder, pip=tuple(wheels), **tomllib.loads((folder / "recipe.toml").read_text()))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise ImageBuildFailed(f"{folder / 'recipe.toml'} is not a recipe: {error}") from error


@contextmanager
def _engine(seconds: int = _BUILD_SECONDS) -> Iterator[docker.DockerClient]:
    try:
        engine = docker.from_env(timeout=seconds)
        try:
            yield engine
        finally:
            engine.close()
    except APIError as error:
        raise ImageBuildFailed(f"Docker: {error.explanation or error}") from error
    except (DockerException, RequestException) as error:
        raise ImageBuildFailed(
            f"{silent(error)}; `deploy/setup docker` installs and starts an engine, and DOCKER_HOST "
            "names one that runs elsewhere"
        ) from error


def _make(engine: docker.DockerClient, recipe: _Recipe, say: Say) -> str:
    if _in_reach(engine, recipe.base):
        say(f"building {recipe.tag} from its Dockerfile, since {recipe.base} is available")
        try:
            return _by_dockerfile(engine, recipe)
        except (BuildError, APIError) as error:
            log = "".join(part.get("stream", "") for part in getattr(error, "build_log", []))
            say(f"the Dockerfile could not be built:\n{_tail(log or str(error))}")
    say(f"building {recipe.tag} from Debian packages, without a registry")
    return _by_debian(engine, recipe)


def _in_reach(engine: docker.DockerClient, base: str) -> bool:
    with suppress(ImageNotFound):
        return bool(engine.images.get(base))
    with suppress(ImageBuildFailed), _engine(_PROBE_SECONDS) as impatient:
        return bool(impatient.images.get_registry_data(base))
    return False


def _by_dockerfile(engine: docker.DockerClient, recipe: _Recipe) -> str:
    packages = {"PACKAGES": " ".join(recipe.all_packages)}
    image, _ = engine.images.build(path=str(recipe.folder), buildargs=packages, rm=True, forcerm=True)
    return str(image.id)


def _by_debian(engine: docker.DockerClient, recipe: _Recipe) -> str:
    # the last stage of the Dockerfile says how the image is run, and `docker import` takes the same instructions
    changes = recipe.dockerfile("ENV", "CMD", "ENTRYPOINT", "WORKDIR", "USER")
    script = recipe.folder.parent / "from-debian"
    with tempfile.TemporaryDirectory(prefix="evalpool-image-") as scratch:
        tree = Path(scratch) / "tree.tar"
        command = ["sh", str(script), recipe.suite, str(recipe.folder / "finish"), str(tree), *recipe.all_packages]
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if run.returncode:
            if unknown := re.search(r"^E: Unable to locate package (\S+)", run.stderr, re.MULTILINE):
                for entry in recipe.apt:
                    if entry.text == unknown[1]:
                        raise InvalidAddition(f"{entry.place}: Debian {recipe.suite} has no package {entry.text}.")
            raise ImageBuildFailed(
                f"The image could not be built from Debian packages:\n{_tail(run.stderr)}\n"
                f"Alternatively, give the engine {recipe.base} (docker pull, docker load): then the Dockerfile is used."
            )
        answer = engine.api.import_image_from_file(str(tree), changes=changes)
    last = json.loads(str(answer).strip().splitlines()[-1])
    if "error" in last:
        raise ImageBuildFailed(f"The engine did not accept the file tree: {last['error']}")
    return str(last["status"])


def _with_wheels(engine: docker.DockerClient, recipe: _Recipe, tree_id: str, say: Say) -> str:
    """Return an image that has the wheels, too."""
    say(f"adding the wheels of {', '.join(map(str, recipe.pip))}")
    place = f"/usr/local/lib/python{recipe.python}/dist-packages"
    script = recipe.folder.parent / "with-wheels"
    with tempfile.TemporaryDirectory(prefix="evalpool-image-") as scratch:
        target = Path(scratch) / "packages"
        target.mkdir(mode=0o755)
        requirements.install([*recipe.pip], target, str(recipe.python), engine.version()["Arch"])
        for name in recipe.prune:
            for folder in [path for path in target.rglob(name) if path.is_dir()]:
                shutil.rmtree(folder, ignore_errors=True)  # it may be in one that is gone already
        shutil.copy(script, Path(scratch) / "with-wheels")
        (Path(scratch) / "Dockerfile").write_text(
            f"FROM {tree_id}\nCOPY packages {place}\nCOPY with-wheels /with-wheels\n"
            f"RUN sh /with-wheels {place} && rm /with-wheels\n"
        )
        try:
            image, _ = engine.images.build(path=scratch, rm=True, forcerm=True, network_mode="none")
        except BuildError as error:
            log = "".join(part.get("stream", "") for part in error.build_log)
            raise ImageBuildFailed(
                f"The wheels could not be added to the image:\n{_tail(log or str(error))}"
            ) from error
    return str(image.id)


def _check(engine: docker.DockerClient, recipe: _Recipe, image_id: str, say: Say) -> dict[str, str]:
    """Run the recipe's check in the new image; return the versions that it found, as a label."""
    command = [*recipe.check, *recipe.toolchains]
    if recipe.own:
        command = ["python3", "-c", _CHECK, *recipe.requested] if recipe.python else []
    if not command:
        return {}
    trial = engine.containers.create(
        image_id,
        command,
        network_mode="none",
        user="65534:65534",
        read_only=True,
        tmpfs={"/tmp": "exec,size=512m"},
    )
    try:
        trial.start()
        code, said = trial.wait()["StatusCode"], trial.logs().decode(errors="replace")
        found = trial.logs(stderr=False).decode(errors="replace")
    except APIError as error:
        code, said = 1, str(error)
    finally:
        trial.remove(force=True, v=True)
    if code:
        with suppress(APIError):  # the Dockerfile may have given the same image again, which others are built on
            engine.images.remove(image_id)
        raise ImageBuildFailed(f"The new image failed the check in {recipe.folder}/recipe.toml:\n{_tail(said)}")
    for line in said.splitlines():
        if line.startswith("warning: "):
            say(f"{line}; perhaps a Debian package is missing (--apt)")
    return {VERSIONS_LABEL: found.strip()} if found.strip() else {}


def _labelled(engine: docker.DockerClient, image_id: str, labels: dict[str, str]) -> str:
    """Return an image of the same files with labels, which come last because some say what the check has found."""
    image, _ = engine.images.build(fileobj=io.BytesIO(f"FROM {image_id}\n".encode()), labels=labels, rm=True)
    return str(image.id)


def _tail(text: str) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-8:])


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evalpool.worker.machine.images", description="Build and list the images of sandboxes."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the images that were built on this engine")
    builder = commands.add_parser("build", help="build a recipe")
    builder.add_argument("name", nargs="?", default="python", metavar="NAME", help=f"one of: {', '.join(recipes())}")
    builder.add_argument("--without", default="", metavar="TOOLCHAIN,...", help="toolchains to leave out")
    builder.add_argument(
        "--if-missing", action="store_true", help="build only if the image is missing or was built from an older recipe"
    )
    chosen = parser.parse_args()

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    try:
        if chosen.command == "build":
            without = chosen.without.split(",") if chosen.without else []
            build(chosen.name, without=without, if_missing=chosen.if_missing, say=say)
            return
        for image in installed():
            size, created = f"{image.size_bytes / 1e6:.0f} MB", f"{image.created:%Y-%m-%d %H:%M}"
            say(f"{image.tag}  {image.id[7:19]}  {size}  {created}  {image.languages}")
    except ImageBuildFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
