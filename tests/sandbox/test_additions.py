"""Images with packages of one's own. No test here needs a package index: the wheels are made by the tests."""

import zipfile
from pathlib import Path

import docker
import pytest
from docker.errors import ImageNotFound

from evalpool.api.cli import main
from evalpool.schemas.errors import ImageBuildFailed, InvalidAddition
from evalpool.worker.machine import images, requirements

TAG = "evalpool-tests/own:1"


def say(line: str) -> None:
    """Print nothing."""


def wheel(folder: Path, name: str, code: str, *needs: str) -> Path:
    """A wheel with one module and one command."""
    path = folder / f"{name}-1.5-py3-none-any.whl"
    about = f"{name}-1.5.dist-info"
    metadata = "".join(f"{line}\n" for line in (
        "Metadata-Version: 2.1", f"Name: {name}", "Version: 1.5", *(f"Requires-Dist: {need}" for need in needs),
    ))  # fmt: skip
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", code)
        file.writestr(f"{name}/tests/__init__.py", "")
        file.writestr(f"{about}/METADATA", metadata)
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/entry_points.txt", f"[console_scripts]\nsay-{name} = {name}:main\n")
        file.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes with one recipe, whose Debian packages nobody has."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "recipe.toml").write_text(
        'tag = "evalpool/toys:1"\npython = "3.11"\nsuite = "bookworm"\npackages = ["dash"]\n'
    )
    (tmp_path / "toy" / "Dockerfile").write_text("FROM nobody/has:this\n")
    (tmp_path / "from-debian").write_text("echo 'E: Unable to locate package nowhere' >&2; exit 100\n")
    (tmp_path / "with-wheels").write_text((images._PLACES[0] / "with-wheels").read_text())
    monkeypatch.setattr(images, "_PLACES", (tmp_path,))
    return tmp_path


@pytest.mark.docker
def test_an_image_of_ones_own_has_the_packages_of_its_requirements_file(
    toy: Path, engine_client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(engine_client.images.get("evalpool/python:3.11").id)
    monkeypatch.setattr(images, "_make", lambda *_: base)
    wheel(toy, "greeter", "from helper import word\ndef main(): print(word)\n", "helper>=1")
    wheel(toy, "helper", "word = 'hello'\n")
    broken = wheel(toy, "broken", "import libmissing\n")
    file = toy / "requirements.txt"
    file.write_text(f"# mine\n--no-index\n--find-links {toy}\ngreeter ~= 1.5  # says hello\n{broken}\nbroken\n")
    said: list[str] = []
    try:
        built = images.build("toy", tag=TAG, pip=file, say=said.append)
        (image,) = (image for image in images.installed() if image.tag == TAG)
        assert (image.id, image.languages) == (built, "python 3.11, greeter 1.5, broken 1.5")
        assert any(line.startswith("warning: `import broken` fails: ModuleNotFoundError") for line in said)
        look = "say-greeter; python3 -c 'import greeter, os; print(os.path.isfile(greeter.__cached__))'; id -u"
        output = engine_client.containers.run(TAG, ["sh", "-c", look], user="54321", network_mode="none", remove=True)
        assert output.decode().split() == ["hello", "True", "54321"]

        assert images.build("toy", tag=TAG, pip=file, if_missing=True, say=say) == built
        file.write_text(f"--no-index\n--find-links {toy}\nhelper\n")
        assert images.build("toy", tag=TAG, pip=file, if_missing=True, say=say) != built
        assert engine_client.images.get(base).tags  # what it was built on stays
    finally:
        engine_client.images.remove(TAG, force=True)


@pytest.mark.docker
def test_folders_that_a_recipe_prunes_do_not_get_into_the_image(
    toy: Path, engine_client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(engine_client.images.get("evalpool/python:3.11").id)
    monkeypatch.setattr(images, "_make", lambda *_: base)
    wheel(toy, "helper", "word = 'hello'\n")
    with (toy / "toy" / "recipe.toml").open("a") as recipe:
        recipe.write('prune = ["tests"]\ncheck = ["python3", "-c", "import helper"]\n')
    (toy / "toy" / "requirements.txt").write_text(f"--no-index\n--find-links {toy}\nhelper\n")
    try:
        images.build("toy", say=say)
        look = ["sh", "-c", "cd /usr/local/lib/python3.11/dist-packages/helper; echo *"]
        assert engine_client.containers.run("evalpool/toys:1", look, network_mode="none", remove=True).split() == [
            b"__init__.py",
            b"__pycache__",
        ]
    finally:
        engine_client.images.remove("evalpool/toys:1", force=True)


@pytest.mark.docker
def test_a_requirement_that_cannot_be_had_is_named_with_its_file_and_line(
    toy: Path, engine_client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(engine_client.images.get("evalpool/python:3.11").id)
    monkeypatch.setattr(images, "_make", lambda *_: base)
    wheel(toy, "helper", "")
    wheel(toy, "greeter", "", "No_Where>1")
    file = toy / "requirements.txt"
    for lines, why in {
        "helper\nnowhere==2": rf"{file}:4: there is no wheel of nowhere==2 for Python 3\.11 on ",
        "helper==3": rf"{file}:3: there is no wheel of helper==3 for Python",
        "greeter": rf"{file}: one of the packages needs No_Where, of which there is no wheel",
        "helper==1.5\nhelper==1.6": rf"{file}:3, {file}:4: pip could not install the requirements:\nCannot",
    }.items():
        file.write_text(f"--no-index\n--find-links {toy}\n{lines}\n")
        with pytest.raises(InvalidAddition, match=why):
            images.build("toy", tag=TAG, pip=file, say=say)
    with pytest.raises(ImageNotFound):
        engine_client.images.get(TAG)


@pytest.mark.docker
def test_an_unknown_debian_package_is_named_with_its_file_and_line(toy: Path) -> None:
    file = toy / "packages.txt"
    file.write_text("# shapes\nlibgeos-c1v5\n\nnowhere\n")
    with pytest.raises(InvalidAddition, match=rf"{file}:4: Debian bookworm has no package nowhere\."):
        images.build("toy", tag=TAG, apt=file, say=say)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("numpy\nscipy=1.2\n", ":2: 'scipy=1.2' is not a requirement: Expected"),
        ("numpy \\\n  --hash=sha256:0\n\nscipy >=\n", ":4: 'scipy >=' is not a requirement"),
        ("-e .\n", ":1: '-e' is not possible, as an image holds only wheels. The options that a file may have are -i,"),
        ("-e./x\n", ":1: '-e./x' is not possible"),
        ("--edit ./x\n", ":1: '--edit' is not possible"),
        ("--target=/\n", ":1: '--target=/' is not possible"),
        ("numpy\n--no-binary :all:\n", ":2: '--no-binary' is not possible"),
        ("--no-index \\\n '--no-binary=:all:'\n", ":1: '--no-binary=:all:' is not possible"),
        ("numpy --config-settings=a=b\n", ":1: '--config-settings=a=b' is not possible"),
        ("numpy\t--global-option=x\n", ":1: '--global-option=x' is not possible"),
        ("numpy -e ./x\n", ":1: '-e' is not possible"),
        ("-r other.txt\n", ":1: '-r' is not possible"),
        ("--find-links 'x\n", ':1: "--find-links \'x" is not a requirement: No closing quotation.'),
        ("a @ git+https://host/a\n", ":1: 'a @ git+https://host/a' is not possible, as an image holds only wheels."),
        ("a @ git+https://host/a.whl\n", ":1: 'a @ git+https://host/a.whl' is not possible"),
        ("git+https://host/a.whl\n", ":1: 'git+https://host/a.whl' is not possible"),
        ("a @ https://host/a-1.tar.gz\n", ":1: 'a @ https://host/a-1.tar.gz' is not possible"),
        ("a @ file:///a\n", ":1: 'a @ file:///a' is not possible"),
        ("./a\n", ":1: './a' is not a requirement"),
        ("# nothing\n\n", " lists no package."),
    ],
)
def test_a_requirements_file_with_an_error_is_refused_with_the_line(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(text)
    with pytest.raises(InvalidAddition) as refused:
        requirements.requirements(file)
    assert str(refused.value).startswith(f"{file}{why}")


def test_a_requirements_file_may_have_comments_options_and_joined_lines(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(
        "# a\n--index-url https://a/#b\nnumpy==1.26.4 \\\n --hash=sha256:0  # c\n./a-1-py3-none-any.whl\nPy_YAML\n"
        "b @ https://host/b-1-py3-none-any.whl#sha256=0\n-i https://a --extra-index-url=https://b\n-f./wheels\n"
    )
    found = [(entry.line, entry.text, entry.name) for entry in requirements.requirements(file)]
    assert found == [
        (2, "--index-url https://a/#b", ""), (3, "numpy==1.26.4", "numpy"), (5, "./a-1-py3-none-any.whl", ""),
        (6, "Py_YAML", "py-yaml"), (7, "b @ https://host/b-1-py3-none-any.whl#sha256=0", "b"), (8, "-i https://a", ""),
        (9, "-f./wheels", ""),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["libgeos_c\n", "gcc; reboot\n", "-y\n", "gcc=1\n"])
def test_a_line_that_is_not_the_name_of_a_debian_package_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "packages.txt"
    file.write_text(f"gcc\n{text}")
    with pytest.raises(InvalidAddition, match=rf"{file}:2: .* is not the name of a Debian package"):
        requirements.debian_packages(file)


@pytest.mark.parametrize(
    "tag", ["lab/science:1", "science", "a.b-c__d/e:V1.0_x", "host:5000/lab/science:1", "localhost:5000/a"]
)
def test_a_valid_name_of_an_image_is_accepted(tag: str) -> None:
    assert requirements.checked_tag(tag) in (tag, f"{tag}:latest")


@pytest.mark.parametrize(
    "tag",
    ["", "Lab/science:1", "lab/science:", "lab//x:1", "a b:1", "-a:1", "a@sha256:1", "a:b:c", "a:/b:1", "a:x/b:1"],
)
def test_an_invalid_name_of_an_image_is_refused(tag: str) -> None:
    with pytest.raises(InvalidAddition, match="is not the name of an image"):
        requirements.checked_tag(tag)


def test_the_command_line_refuses_invalid_additions(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "bad.txt").write_text("numpy=1\n")
    for arguments, why in {
        ("--pip", "bad.txt"): "An image with added packages needs a name of its own",
        ("--tag", "evalpool/python:3.11"): "is a name of evalpool's own images",
        ("--tag", "Lab"): "'Lab' is not the name of an image",
        ("--tag", "lab/a:1", "--pip", f"{toy}/bad.txt"): "bad.txt:1: 'numpy=1' is not a requirement",
        ("--tag", "lab/a:1", "--apt", f"{toy}/none.txt"): "none.txt cannot be read: No such file or directory",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["images", "build", "toy", *arguments])
        assert ended.value.code == 2
        assert why in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_pip_is_asked_for_if_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda _: None)
    with pytest.raises(ImageBuildFailed, match="Wheels need pip"):
        requirements.install([], tmp_path, "3.11", "amd64")
