"""What live workers report about themselves: which images they have, and how they run programs."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

from schemas import images
from schemas.settings import Settings
from schemas.version import version

DEFAULTS = ("image", "code_image", "notebook_image")


class Member(BaseModel):
    """One worker. Fields of newer versions are ignored."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str = ""
    images: dict[str, str] = {}
    """Name → digest, of every image on its machine."""
    digests: tuple[str, ...] = ()
    """The digests of all images on its machine, including images without a name."""
    defaults: dict[str, str] = {}
    """Name of a setting → its default image, for jobs that name no image."""
    profile: str = ""
    """How it runs programs: everything else that its results depend on."""

    @classmethod
    def of(cls, settings: Settings, names: dict[str, str], digests: Iterable[str]) -> "Member":
        """A worker with these settings, on a machine with these images."""
        return cls(
            name=settings.worker_name,
            version=version(),
            images=names,
            digests=tuple(sorted(digests)),
            defaults={name: getattr(settings, name) for name in DEFAULTS},
            profile=profile(settings),
        )


class Fleet(BaseModel):
    """All live workers of one database."""

    model_config = ConfigDict(frozen=True)

    members: tuple[Member, ...] = ()

    def settings(self, own: Settings) -> Settings:
        """These settings, with the default images that all workers agree on. Images that are set here stay."""
        agreed: dict[str, Any] = {}
        for name in DEFAULTS:
            values = {member.defaults[name] for member in self.members if name in member.defaults}
            if len(values) == 1 and name not in own.model_fields_set:
                agreed |= {name: values.pop()}
        return own.model_copy(update=agreed) if agreed else own

    def pin(self, name: str) -> str:
        """This name with the digest that most workers have for it, or the name alone if no worker has the image."""
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
    return f"{settings.interpreter} {settings.runtime or 'default runtime'} {','.join(settings.preload)}".strip()


def resolve(name: str, known: dict[str, str]) -> str | None:
    """The digest of the image with this name. The name may lack a tag, or be the digest itself."""
    last = name.rpartition("/")[2]
    tagged = name if ":" in last or "@" in last else f"{name}:latest"
    return known.get(tagged) or (name if name in known.values() else None)
