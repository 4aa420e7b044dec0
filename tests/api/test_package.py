"""A wheel installs one top-level name. In a checkout, the names of the folders lead to the same modules."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT


class Project(NamedTuple):
    """Another project with evalpool installed in its virtual environment."""

    folder: Path
    bin: Path
    wheel: Path

    def run(self, *command: str) -> str:
        """Run a program of the virtual environment in the project's folder, and return what it prints."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("EVALPOOL_", "PYTHON"))}
        own["EVALPOOL_STATE_DIR"] = str(self.folder / "state")
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.folder, env=own, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def python(self, code: str) -> str:
        """Run code with the project's folder first on the path, as for a script of the project."""
        return self.run("python", "-c", code)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project that has an `api` package and modules `schemas` and `worker` of its own."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"  # building in the checkout would leave files behind
    shutil.copytree(
        ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__")
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", *options, "-w", place, source], check=True, timeout=300)
    (wheel,) = place.glob("evalpool-*.whl")
    home = place / "venv"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", *options, wheel], check=True, timeout=300)
    # A path in a .pth file brings the dependencies, but not the editable evalpool: its own .pth file is not read there.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    folder = place / "project"
    (folder / "api").mkdir(parents=True)
    for name in ("api/__init__", "api/jobs", "schemas", "worker"):
        (folder / f"{name}.py").write_text(f"OWNER = 'the project ({name})'\n")
    return Project(folder, home / "bin", wheel)


def test_a_wheel_has_one_top_level_name_the_type_marker_and_the_recipes(project: Project) -> None:
    names = zipfile.ZipFile(project.wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"evalpool"}
    assert "evalpool/py.typed" in names
    recipes = {path.parent.name for path in ROOT.glob("images/*/recipe.toml")}
    assert recipes
    for recipe in recipes:
        assert f"evalpool/worker/machine/recipes/{recipe}/recipe.toml" in names
    assert "evalpool/worker/machine/recipes/from-debian" in names
    assert "evalpool/api/reports/templates/report.html" in names


def test_a_wheel_built_from_a_source_distribution_has_the_same_files(project: Project, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path]
    subprocess.run(command, cwd=project.wheel.parent / "source", check=True, timeout=300, capture_output=True)
    (archive,) = tmp_path.glob("evalpool-*.tar.gz")
    with tarfile.open(archive) as packed:
        folders = {name.split("/")[1] for name in packed.getnames()}
    assert "evalpool" in folders
    assert not folders & {"api", "worker", "schemas"}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--quiet", "-w", tmp_path, archive], check=True, timeout=300)
    (wheel,) = tmp_path.glob("evalpool-*.whl")
    assert sorted(zipfile.ZipFile(wheel).namelist()) == sorted(zipfile.ZipFile(project.wheel).namelist())


def test_evalpool_works_in_a_project_with_modules_of_the_same_names(project: Project) -> None:
    printed = project.python(
        "import evalpool, api, api.jobs, schemas, worker\n"
        "from evalpool import JobSpec, submit_job\n"
        "from evalpool.api.sandbox import SandboxFactory\n"
        "from evalpool.sandbox import SandboxFactory as Same\n"
        "assert SandboxFactory is Same\n"
        "assert submit_job.__module__ == 'evalpool.api.jobs'\n"
        "print(evalpool.__file__, JobSpec(code='x').tool)\n"
        "print(*{module.OWNER.partition(' (')[0] for module in (api, api.jobs, schemas, worker)})"
    )
    place, owner = printed.splitlines()
    assert place == f"{next(project.bin.parent.glob('lib/python*/site-packages'))}/evalpool/__init__.py python_executor"
    assert owner == "the project"


@pytest.mark.parametrize("command", [("evalpool",), ("python", "-m", "evalpool")], ids=" ".join)
def test_the_command_works_in_such_a_project(project: Project, command: tuple[str, ...]) -> None:
    assert project.run(*command, "--version") == project.python(
        "from importlib.metadata import version; print(version('evalpool'))"
    )


def test_celery_finds_the_worker_in_such_a_project(project: Project) -> None:
    assert "evalpool" in project.run("python", "-m", "celery", "-A", "evalpool.worker", "report")


@pytest.fixture(scope="module")
def linkless(project: Project) -> Path:
    """A checkout as git makes it where symbolic links are not available: each link is a small file with its target."""
    folder = project.wheel.parent / "linkless"
    shutil.copytree(project.wheel.parent / "source", folder, symlinks=True)
    links = [path for path in (folder / "evalpool").iterdir() if path.is_symlink()]
    assert links
    for link in links:
        target = link.readlink()
        link.unlink()
        link.write_text(str(target))
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ("-c", "import evalpool.api.jobs, api.jobs; assert api.jobs is evalpool.api.jobs"),
        ("-c", "import api.jobs, evalpool.api.jobs; assert api.jobs is evalpool.api.jobs"),
        ("-c", "from evalpool.sandbox import Sandbox; from api.sandbox import Sandbox as same; assert Sandbox is same"),
        ("-m", "evalpool", "--version"),
        ("-m", "celery", "-A", "worker", "report"),
    ],
    ids=" ".join,
)
def test_a_checkout_without_symbolic_links_works(linkless: Path, command: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, *command], cwd=linkless, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_checkout_without_symbolic_links_builds_the_same_wheel(
    project: Project, linkless: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=linkless, check=True, timeout=300, capture_output=True)
    (wheel,) = tmp_path.glob("evalpool-*.whl")
    assert sorted(zipfile.ZipFile(wheel).namelist()) == sorted(zipfile.ZipFile(project.wheel).namelist())


def in_checkout(code: str, **env: str) -> str:
    """Run code in the checkout and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("first", ["api", "evalpool.api"])
def test_the_folders_names_lead_to_the_same_modules(first: str) -> None:
    in_checkout(
        f"import {first}.jobs\n"
        "import api.jobs, evalpool.api.jobs, schemas.job, worker.pool\n"
        "import evalpool.schemas.job, evalpool.worker.pool\n"
        "assert api is evalpool.api and api.jobs is evalpool.api.jobs\n"
        "assert schemas.job is evalpool.schemas.job and worker.pool is evalpool.worker.pool\n"
        "assert api.jobs.__spec__.name == api.jobs.__name__ == 'evalpool.api.jobs'"
    )


@pytest.mark.parametrize("first", ["evalpool.sandbox", "evalpool.api.sandbox"])
def test_evalpool_sandbox_is_the_library(first: str) -> None:
    in_checkout(
        f"import {first}.manager\n"
        "import evalpool.sandbox.manager, evalpool.api.sandbox.manager, api.sandbox.manager\n"
        "assert evalpool.sandbox is evalpool.api.sandbox is api.sandbox\n"
        "assert evalpool.sandbox.manager is evalpool.api.sandbox.manager is api.sandbox.manager"
    )


def test_threads_can_import_the_library_for_the_first_time_together() -> None:
    in_checkout(
        "import sys, threading\n"
        "names = ['box', 'docker', 'factory', 'local', 'manager', 'output', 'sandbox', 'transfer']\n"
        "together, failures, found = threading.Barrier(len(names)), [], set()\n"
        "class Witness:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        found.add(sys.modules.get('evalpool.sandbox'))\n"
        "def first_import(name):\n"
        "    together.wait()\n"
        "    try: __import__(f'evalpool.sandbox.{name}')\n"
        "    except Exception as error: failures.append(error)\n"
        "sys.meta_path.insert(0, Witness())\n"
        "threads = [threading.Thread(target=first_import, args=(name,)) for name in names]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "assert not failures, failures\n"
        # What makes it safe: no thread ever meets another module under this name.
        "assert found <= {None, sys.modules['evalpool.api.sandbox']}, found"
    )


def test_type_checkers_see_every_module_of_the_library() -> None:
    stubs = {path.stem: path.read_text() for path in (ROOT / "evalpool" / "sandbox").glob("*.pyi")}
    assert "from evalpool.api.sandbox import *\n" in stubs.pop("__init__")
    modules = {path.stem for path in (ROOT / "api" / "sandbox").glob("*.py")} - {"__init__"}
    assert stubs == {name: f"from evalpool.api.sandbox.{name} import *\n" for name in modules}


def test_objects_are_pickled_and_compared_across_both_names() -> None:
    in_checkout(
        "import pickle\n"
        "from schemas.job import JobSpec\n"
        "import evalpool.schemas.job\n"
        "spec = pickle.loads(pickle.dumps(JobSpec(code='x')))\n"
        "assert isinstance(spec, evalpool.schemas.job.JobSpec) and spec == JobSpec(code='x')"
    )


def test_a_module_runs_by_the_name_of_its_folder() -> None:
    command = [sys.executable, "-m", "api.cli", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_name_that_no_module_has_is_an_ordinary_import_error() -> None:
    code = "import api\ntry: import api.nonsense\nexcept ModuleNotFoundError as error: print(error.name)"
    assert in_checkout(code) == "api.nonsense"


def test_another_projects_package_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()
    for name in ("__init__", "jobs"):
        (tmp_path / "api" / f"{name}.py").write_text("OWNER = 'somebody else'\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import schemas\n"  # opens a door
        "import api.jobs, evalpool.api.jobs\n"
        "assert api.jobs is not evalpool.api.jobs\n"
        "print(api.OWNER, api.jobs.OWNER)"
    )
    assert in_checkout(code) == "somebody else somebody else"
