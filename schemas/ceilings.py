"""The operator's ceilings on limits: `EVALPOOL_MAX_MEMORY_MIB` and its like."""

from schemas.errors import InvalidJob
from schemas.limits import Limits
from schemas.settings import PREFIX, Settings


def check(limits: Limits, settings: Settings) -> None:
    """Raise `InvalidJob` for the first limit that is over its ceiling. Asked at the submission, and again by the
    worker: a client need not have the operator's settings."""
    for name in Limits.model_fields:
        value = limits.wall if name == "wall_seconds" else getattr(limits, name)
        most = getattr(settings, f"max_{name}")
        if most is not None and value > most:
            setting = f"{PREFIX}MAX_{name.upper()}"
            raise InvalidJob(f"limits.{name}: {value:.15g} is more than the {most:.15g} that {setting} allows")


def lowered(limits: Limits, settings: Settings) -> Limits:
    """The same limits, with no time over its ceiling: for times that evalpool has chosen by itself."""
    cpu = min(limits.cpu_seconds, settings.max_cpu_seconds or limits.cpu_seconds)
    lower = Limits(**limits.model_dump() | {"cpu_seconds": cpu})
    if settings.max_wall_seconds is None or lower.wall <= settings.max_wall_seconds:
        return lower
    return Limits(**lower.model_dump() | {"wall_seconds": settings.max_wall_seconds})
