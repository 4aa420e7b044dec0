"""What the workers that are alive say of themselves: which images they have, and how they run programs."""

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
    """The digests it has, those without a name included."""
    defaults: dict[str, str] = {}
    """The images of jobs that name none, by the name of the setting."""
    profile: str = ""
    """How it runs programs: whatever else its results depend on."""

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
    """All of them."""

    model_config = ConfigDict(frozen=True)

    members: tuple[Member, ...] = ()

    def settings(self, own: Settings) -> Settings:
        """These settings, with the images that all workers agree on where nobody has chosen others here."""
        agreed: dict[str, Any] = {}
        for name in DEFAULTS:
            values = {member.defaults[name] for member in self.members if name in member.defaults}
            if len(values) == 1 and name not in own.model_fields_set:
                agreed |= {name: values.pop()}
        return own.model_copy(update=agreed) if agreed else own

    def pin(self, name: str) -> str:
        """The image of this name with the digest that most workers have for it, or the name alone if none has it."""
        found = Counter(digest for member in self.members if (digest := resolve(name, member.images)))
        return images.pinned(name, found.most_common(1)[0][0] if found else None)

    def has(self, image: str) -> bool:
        """Whether some worker can run jobs of this image."""
        digest, name = images.digest_of(image), images.name_of(image)
        return any(
            digest in member.digests if digest else resolve(name, member.images) is not None for member in self.members
        )

    def profile(self, own: Settings) -> str:
        """How programs are run: as the workers say, or as these settings would have it where there is none."""
        return " | ".join(sorted({member.profile for member in self.members})) or profile(own)


def profile(settings: Settings) -> str:
    """What results depend on besides the image and the version of evalpool."""
    return f"{settings.interpreter} {settings.runtime or 'default runtime'} {','.join(settings.preload)}".strip()


def resolve(name: str, known: dict[str, str]) -> str | None:
    """The digest of an image by its name, which may lack the tag, or be the digest itself."""
    last = name.rpartition("/")[2]
    tagged = name if ":" in last or "@" in last else f"{name}:latest"
    return known.get(tagged) or (name if name in known.values() else None)
