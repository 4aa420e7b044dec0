"""The operator's ceilings on the limits of jobs, such as `EVALPOOL_MAX_MEMORY_MIB`."""

from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.limits import Limits
from evalpool.schemas.settings import PREFIX, Settings


def check(limits: Limits, settings: Settings) -> None:
    """Raise `InvalidJob` for the first limit that is above its ceiling. The submitter checks, and the worker checks
    again, since a submitter may have other settings than the operator."""
    for name in Limits.model_fields:
        value = limits.wall if name == "wall_seconds" else getattr(limits, name)
        most = getattr(settings, f"max_{name}")
        if most is not None and value > most:
            setting = f"{PREFIX}MAX_{name.upper()}"
            raise InvalidJob(f"limits.{name}: {value:.15g} is more than the {most:.15g} that {setting} allows")


def lowered(limits: Limits, settings: Settings) -> Limits:
    """Return the limits with both times lowered to their ceilings, for times that evalpool has chosen, not the
    caller."""
    cpu = min(limits.cpu_seconds, settings.max_cpu_seconds or limits.cpu_seconds)
    lower = Limits(**limits.model_dump() | {"cpu_seconds": cpu})
    if settings.max_wall_seconds is None or lower.wall <= settings.max_wall_seconds:
        return lower
    return Limits(**lower.model_dump() | {"wall_seconds": settings.max_wall_seconds})
