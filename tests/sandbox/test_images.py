"""Recipes, their toolchains, and what an image tells about itself. No test here builds one of the real recipes."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import ImageNotFound
from docker.models.images import ImageCollection

from evalpool.api.cli import main
from evalpool.schemas import Settings
from evalpool.schemas.errors import ImageBuildFailed
from evalpool.worker.machine import doctor, images
from tests.conftest import missing

TAG = "evalpool/toy:1"
RECIPE = """
tag = "evalpool/toy:1"
suite = "bookworm"
packages = ["dash"]
check = ["sh", "-c", '''
    touch /tmp/here && ! touch /here || exit 1
    for name; do pair="$pair${pair:+, }\\"$name\\": \\"$name 1.0\\""; done
    echo "{$pair}"
''', "sh"]

[toolchains]
one = ["dash", "first"]
two = ["second"]
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of the tests, which is the only one during the test."""
    path = tmp_path / "toy" / "recipe.toml"
    path.parent.mkdir()
    path.write_text(RECIPE)
    (tmp_path / "from-debian").touch()
    monkeypatch.setattr(images, "_PLACES", (tmp_path,))
    return path


def say(line: str) -> None:
    """Print nothing."""


def test_every_recipe_can_be_read_and_its_check_knows_all_its_toolchains() -> None:
    assert {"busybox", "code", "notebook", "python"} <= set(images.recipes())
    for name in images.recipes():
        recipe = images._read(name)
        assert recipe.base.startswith("debian:")
        assert all(f'"{toolchain}": (' in recipe.check[-1] for toolchain in recipe.toolchains)
    assert set(images._read("python").packages) == set(images._read("code").packages)
    assert set(images._read("python").packages) < set(images._read("notebook").packages)


def test_toolchains_are_left_out_with_their_packages_and_make_another_image(toy: Path) -> None:
    whole = images._read("toy")
    assert whole.all_packages == ["dash", "first", "second"]
    assert whole.labels[images.TOOLCHAINS_LABEL] == "one,two"
    part = whole.without(["one"])
    assert part.all_packages == ["dash", "second"]
    assert part.labels[images.TOOLCHAINS_LABEL] == "two"
    assert part.labels[images.RECIPE_LABEL] != whole.labels[images.RECIPE_LABEL]
    assert images.TOOLCHAINS_LABEL not in whole.without(["one", "two"]).labels


def test_an_unknown_toolchain_is_refused_and_the_known_ones_are_named(
    toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["images", "build", "toy", "--without", "two,three,four"])
    assert ended.value.code
    assert "no toolchain three, four. Its toolchains are: one, two." in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["images", "build", "toy", "--without", "three"])
    with pytest.raises(SystemExit, match="no toolchain three"):
        images._main()


def test_an_invalid_recipe_is_refused_by_name(toy: Path) -> None:
    with pytest.raises(ImageBuildFailed, match=r"no recipe 'code'. There are: toy"):
        images.build("code", say=say)
    toy.write_text(RECIPE + 'three = "not a list"')
    with pytest.raises(ImageBuildFailed, match=r"toy/recipe.toml is not a recipe"):
        images.build("toy", say=say)


@pytest.mark.docker
def test_an_image_says_which_toolchains_it_has_and_in_which_versions(
    toy: Path, engine_client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_in(*_: object) -> str:
        return str(engine_client.images.build(path=str(toy.parent), rm=True)[0].id)

    base = engine_client.images.get("evalpool/python:3.11").id
    (toy.parent / "Dockerfile").write_text(f'FROM {base}\nENV TOY=1\nCMD ["true"]\n')
    monkeypatch.setattr(images, "_make", stand_in)
    try:
        first = images.build("toy", say=say)
        assert images.build("toy", if_missing=True, say=say) == first
        (image,) = (image for image in images.installed() if image.tag == TAG)
        assert (image.id, image.languages) == (first, "python 3.11, one 1.0, two 1.0")
        config = engine_client.images.get(TAG).attrs["Config"]
        assert "TOY=1" in config["Env"]
        assert config["Cmd"] == ["true"]

        second = images.build("toy", without=["one"], if_missing=True, say=say)
        assert engine_client.images.get(TAG).labels[images.TOOLCHAINS_LABEL] == "two"
        with pytest.raises(ImageNotFound):
            engine_client.images.get(first)

        toy.write_text(RECIPE.replace("exit 1", "exit 1; echo it is broken; exit 1"))
        with pytest.raises(ImageBuildFailed, match="it is broken"):
            images.build("toy", say=say)
        assert engine_client.images.get(TAG).id == second
    finally:
        engine_client.images.remove(TAG, force=True)


@pytest.mark.docker
@pytest.mark.parametrize("environment", [{}, {"HOME": "/box"}, {"HOME": "/nowhere", "MPLCONFIGDIR": "/tmp/mine"}])
def test_the_notebook_image_draws_without_warnings_and_writes_no_files(
    engine_client: docker.DockerClient, environment: dict[str, str]
) -> None:
    tag = images._read("notebook").tag
    try:
        engine_client.images.get(tag)
    except ImageNotFound:
        missing(f"no image {tag} here: evalpool images build notebook")
    (image,) = (image for image in images.installed() if image.tag == tag)
    assert "matplotlib 3." in image.languages
    assert "pandas 1." in image.languages

    own = ["/tmp/mine"] if "MPLCONFIGDIR" in environment else []
    drawing = (
        "import io, glob, matplotlib.pyplot as plt, pandas\n"
        "pandas.DataFrame({'y': [1, 4, 9]}).plot(title='$x^2$')\n"
        "plt.savefig(png := io.BytesIO())\n"
        "plt.show()\n"
        "print(png.getvalue()[1:4].decode(), glob.glob('/tmp/*') + glob.glob('/box/*') + glob.glob('/box/.*'))"
    )
    said = engine_client.containers.run(
        tag,
        ["python3", "-c", drawing],
        environment=environment,
        stderr=True,
        remove=True,
        network_mode="none",
        user="54321:54321",
        read_only=True,
        tmpfs={"/tmp": "noexec,size=16m", "/box": "size=16m"},
    )
    assert said.decode().splitlines() == [f"PNG {own}"]


@pytest.fixture
def python_alone(monkeypatch: pytest.MonkeyPatch) -> images.Image:
    made = images.Image("evalpool/python:3.11", "sha256:0123456789ab", 1 << 27, datetime.now(UTC), "3.11", {})
    monkeypatch.setattr(images, "installed", lambda: [made])
    monkeypatch.setattr(doctor, "installed", lambda: [made])
    monkeypatch.setattr(ImageCollection, "get", _only(made.tag, ImageCollection.get))
    return made


def _only(known: str, get: Any) -> Any:
    def got(self: Any, name: str) -> Any:
        if name != known:
            raise ImageNotFound(name)
        return get(self, name)

    return got


@pytest.mark.docker
def test_the_doctor_tells_what_images_run_and_how_to_get_more(
    engine_client: docker.DockerClient, python_alone: images.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [(finding.name, finding.ok, finding.found) for finding in doctor.examine()]
    assert any(name == "sandbox image" and found.endswith("MB: python 3.11") for name, _, found in findings)
    lacking = "evalpool/code:12 is missing, which languages besides Python and bash need: `evalpool images build code`"
    assert any(name == "another image" and ok and found.startswith(lacking) for name, ok, found in findings)
    assert any(name == "tools" and "python_executor: python" in found for name, _, found in findings)

    code = images.Image("evalpool/code:12", "sha256:abcdef", 10**9, datetime.now(UTC), "3.11", {"c": "gcc 12.2.0"})
    monkeypatch.setattr(doctor, "installed", lambda: [code, python_alone])
    others = [finding.found for finding in doctor.examine() if finding.name == "another image"]
    assert others == [
        "evalpool/code:12 abcdef, 1000 MB: python 3.11, c (gcc 12.2.0)",
        "evalpool/notebook:3.11 is missing, which notebooks with plots need: `evalpool images build notebook` "
        "builds it",
    ]
    assert all(finding.ok for finding in doctor.examine() if finding.name == "another image")
    monkeypatch.setattr(doctor, "settings", lambda: Settings(code_image="evalpool/nope:1"))
    wrong = [finding for finding in doctor.examine() if finding.name == "another image" and not finding.ok]
    assert [finding.found.partition(",")[0] for finding in wrong] == ["evalpool/nope:1 is missing"]
    assert wrong[0].remedy == "`docker pull evalpool/nope:1` fetches it from a registry, or correct EVALPOOL_CODE_IMAGE"
    monkeypatch.setattr(doctor, "settings", lambda: Settings(runtime="nonsense"))
    (runtime,) = (finding for finding in doctor.examine() if finding.name == "runtime")
    assert not runtime.ok
    assert "correct EVALPOOL_RUNTIME" in runtime.remedy


def test_the_list_shows_sizes_and_languages(python_alone: images.Image, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["images", "list"])
    assert not ended.value.code
    head, languages = capsys.readouterr().out.splitlines()
    assert head.startswith("evalpool/python:3.11  0123456789ab  134 MB  ")
    assert languages.strip() == "python 3.11"
