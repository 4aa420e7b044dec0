"""The live workers, as they report themselves: their fleet, their images, and how they run programs."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

from evalpool.schemas import images
from evalpool.schemas.settings import Settings
from evalpool.schemas.version import version


class Member(BaseModel):
    """One worker. Fields of newer versions are ignored."""

    model_config = ConfigDict(frozen=True)

    name: str
    fleet: str = ""
    """The name of the fleet whose jobs the worker claims; empty unless `EVALPOOL_FLEET` is set."""
    version: str = ""
    images: dict[str, str] = {}
    """Name → digest of every image on the machine."""
    digests: tuple[str, ...] = ()
    """The digests of all images on the machine, including images without a name."""
    defaults: dict[str, str] = {}
    """Name of a setting → its image, for jobs that name no image."""
    slots: int | None = None
    """How many jobs the worker runs at a time; `None` from workers of older versions."""
    profile: str = ""
    """How the worker runs programs: what its results depend on besides the image and the version."""

    @classmethod
    def of(cls, settings: Settings, names: dict[str, str], digests: Iterable[str]) -> "Member":
        """The worker with these settings on a machine with these images."""
        return cls(
            name=settings.worker_name,
            fleet=settings.fleet or "",
            slots=settings.slots,
            version=version(),
            images=names,
            digests=tuple(sorted(digests)),
            defaults={name: getattr(settings, name) for name in images.DEFAULTS.values()},
            profile=profile(settings),
        )


class Fleet(BaseModel):
    """The live workers of one database that claim the same jobs."""

    model_config = ConfigDict(frozen=True)

    members: tuple[Member, ...] = ()

    def settings(self, own: Settings) -> Settings:
        """Return these settings with the default images that all workers agree on. Images that are set explicitly
        stay."""
        agreed: dict[str, Any] = {}
        for name in images.DEFAULTS.values():
            values = {member.defaults[name] for member in self.members if name in member.defaults}
            if len(values) == 1 and name not in own.model_fields_set:
                agreed |= {name: values.pop()}
        return own.model_copy(update=agreed) if agreed else own

    def pin(self, name: str) -> str:
        """Return the image of this name with the digest that most workers have for it, or the name alone if no worker
        has it."""
        found = Counter(digest for member in self.members if (digest := resolve(name, member.images)))
        return images.pinned(name, found.most_common(1)[0][0] if found else None)

    def has(self, image: str) -> bool:
        """Whether at least one worker has this image."""
        digest, name = images.digest_of(image), images.name_of(image)
        return any(
            digest in member.digests if digest else resolve(name, member.images) is not None for member in self.members
        )

    def profile(self, own: Settings) -> str:
        """How the workers run programs; if there is no worker, how one with these settings would run them."""
        return " | ".join(sorted({member.profile for member in self.members})) or profile(own)


def profile(settings: Settings) -> str:
    """What results depend on besides the image and the version of evalpool."""
    imports = "" if settings.warm_imports else "no warm imports "
    preload = ",".join(settings.preload)
    return f"{settings.interpreter} {settings.runtime or 'default runtime'} {imports}{preload}".strip()


def resolve(name: str, known: dict[str, str]) -> str | None:
    """The digest of the image with this name, or `None`. The name may lack a tag, or be the digest itself."""
    last = name.rpartition("/")[2]
    tagged = name if ":" in last or "@" in last else f"{name}:latest"
    return known.get(tagged) or (name if name in known.values() else None)
