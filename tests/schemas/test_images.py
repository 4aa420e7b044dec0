"""Which image a job gets, and what its result depends on, is decided in schemas/images.py."""

from typing import Any

import pytest

from evalpool.schemas import JobSpec, Settings, fleet, images

SETTINGS = Settings(image="a:1", code_image="b:1", notebook_image="c:1")


@pytest.mark.parametrize(
    ("fields", "image"),
    [
        ({}, "a:1"),
        ({"tool": "bash"}, "a:1"),
        ({"language": "cpp"}, "b:1"),
        ({"tool": "multi_code_executor", "language": "python"}, "a:1"),
        ({"tool": "notebook_executor"}, "c:1"),
        ({"tool": "notebook_executor", "image": "mine:1"}, "mine:1"),
    ],
)
def test_a_job_that_names_no_image_gets_that_of_its_tool_and_language(fields: dict[str, str], image: str) -> None:
    assert images.wanted(JobSpec(code="x", **fields), SETTINGS) == image


@pytest.mark.parametrize(
    ("tools", "image"),
    [
        ([], "a:1"),
        (["python_executor", "shell_executor"], "a:1"),
        (["python_executor", "notebook_executor"], "c:1"),
        (["notebook_executor", "multi_code_executor"], "b:1"),
    ],
)
def test_a_sandbox_gets_the_image_that_suits_all_of_its_tools(tools: list[str], image: str) -> None:
    assert images.suited(tools, SETTINGS) == image


def test_every_setting_of_an_image_is_among_the_defaults() -> None:
    assert sorted(images.defaults(SETTINGS).values()) == ["a:1", "b:1", "c:1"]
    assert {name for name in Settings.model_fields if name.endswith("image")} == set(images.DEFAULTS.values())


def test_the_digest_of_a_job_depends_on_its_image_and_on_how_programs_are_run() -> None:
    spec = JobSpec(code="x")
    made = [("a:1 sha256:1", "warm"), ("a:1 sha256:2", "warm"), ("c:1 sha256:1", "warm"), ("a:1 sha256:1", "cold")]
    assert len({spec.digest(images.made_by(image, profile)) for image, profile in made}) == 4
    ways: tuple[dict[str, Any], ...] = (
        {}, {"interpreter": "cold"}, {"runtime": "runsc"}, {"preload": "numpy"}, {"warm_imports": False}
    )  # fmt: skip
    assert len({fleet.profile(Settings.model_validate(way)) for way in ways}) == len(ways)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("evalpool/code:12", "`evalpool images build code` builds it"),
        ("evalpool/science:3.11", "`evalpool images build science` builds it"),
        ("other:1", "`docker pull other:1` fetches it from a registry"),
        ("mine:1", "`docker pull mine:1` fetches it from a registry, or correct EVALPOOL_IMAGE"),
        ("own:1", "`docker pull own:1` fetches it from a registry, or correct EVALPOOL_CODE_IMAGE"),
    ],
)
def test_the_remedy_for_a_missing_image_is_one_that_helps(name: str, remedy: str) -> None:
    chosen = Settings(image="mine:1", code_image="own:1")
    assert images.remedy(name, chosen) == remedy
