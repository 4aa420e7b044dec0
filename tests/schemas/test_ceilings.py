import pytest

from evalpool.schemas import InvalidJob, Limits, ceilings
from evalpool.schemas.settings import Settings, settings


@pytest.mark.parametrize("name", Limits.model_fields)
def test_each_limit_has_a_ceiling_and_the_error_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"EVALPOOL_MAX_{name.upper()}", "20")
    ceilings.check(Limits(**_small() | {name: 20}), settings())
    with pytest.raises(InvalidJob) as refused:
        ceilings.check(Limits(**_small() | {name: 21}), settings())
    assert str(refused.value) == f"limits.{name}: 21 is more than the 20 that EVALPOOL_MAX_{name.upper()} allows"


def _small() -> dict[str, int]:
    return dict.fromkeys(Limits.model_fields, 4)


def test_without_ceilings_every_valid_limit_is_allowed() -> None:
    ceilings.check(Limits(cpu_seconds=3600, wall_seconds=86_400, memory_mib=1 << 20, processes=4096), Settings())


def test_the_default_wall_limit_is_compared_with_its_ceiling_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALPOOL_MAX_WALL_SECONDS", "20")
    with pytest.raises(
        InvalidJob, match=r"limits\.wall_seconds: 22 is more than the 20 that EVALPOOL_MAX_WALL_SECONDS"
    ):
        ceilings.check(Limits(), settings())
    ceilings.check(Limits(wall_seconds=20), settings())


def test_times_that_evalpool_chose_are_lowered_to_their_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Limits(cpu_seconds=50, memory_mib=100)
    assert ceilings.lowered(given, settings()) == given
    monkeypatch.setenv("EVALPOOL_MAX_CPU_SECONDS", "10")
    assert ceilings.lowered(given, settings()) == Limits(cpu_seconds=10, memory_mib=100)
    monkeypatch.setenv("EVALPOOL_MAX_WALL_SECONDS", "30")
    assert ceilings.lowered(given, settings()) == Limits(cpu_seconds=10, wall_seconds=30, memory_mib=100)
