"""Which image a job runs in, and what its result depends on besides the job. Both are decided here and nowhere else.

The image is decided when the job is submitted, and written as `NAME` or `NAME DIGEST`. A name such as
`evalpool/python:3.11` can be given to another image at any time; a digest cannot. A space separates the two, since the
name of an image cannot contain one.
"""

from collections.abc import Collection

from evalpool.schemas.job import JobSpec
from evalpool.schemas.settings import Settings
from evalpool.schemas.version import version

DEFAULTS = {"python": "image", "code": "code_image", "notebook": "notebook_image"}
"""Recipe of evalpool → the setting that names the image for jobs of its kind that name none."""
OTHERS = {"evalpool/science:3.11": "science", "evalpool/busybox:1": "busybox"}
"""The images of our other recipes."""


def defaults(settings: Settings) -> dict[str, str]:
    """Recipe → the name of the image that the settings choose for jobs of its kind."""
    return {recipe: getattr(settings, setting) for recipe, setting in DEFAULTS.items()}


def remedy(name: str, settings: Settings) -> str:
    """What to do if there is no image of this name. Images of our recipes can be built; others must be fetched."""
    for recipe, setting in DEFAULTS.items():
        if name == Settings.model_fields[setting].default:
            return f"`evalpool images build {recipe}` builds it"
    if name in OTHERS:
        return f"`evalpool images build {OTHERS[name]}` builds it"
    pull = f"`docker pull {name}` fetches it from a registry"
    chosen = [f"EVALPOOL_{each.upper()}" for each in DEFAULTS.values() if name == getattr(settings, each)]
    return f"{pull}, or correct {' and '.join(chosen)}" if chosen else pull


def wanted(spec: JobSpec, settings: Settings) -> str:
    """The name of the image that a job asks for, or that the settings choose for it."""
    if spec.image is not None:
        return spec.image
    if spec.tool == "notebook_executor":
        return settings.notebook_image
    return settings.image if spec.runs in ("python", "bash") else settings.code_image


def suited(tools: Collection[str], settings: Settings) -> str:
    """The name of the image that the settings choose for a sandbox with all of these tools. The image with the
    compilers goes before that for notebooks: it runs cells, too, although without plots."""
    if "multi_code_executor" in tools:
        return settings.code_image
    return settings.notebook_image if "notebook_executor" in tools else settings.image


def pinned(name: str, digest: str | None) -> str:
    """The image with this name and digest; the name alone if there is no digest."""
    return f"{name} {digest}" if digest else name


def name_of(image: str) -> str:
    """The name of the image, without its digest."""
    return image.partition(" ")[0]


def digest_of(image: str) -> str | None:
    """The digest of the image, or `None` if it is not pinned."""
    return image.partition(" ")[2] or None


def exact(image: str) -> str:
    """The reference to pass to Docker: the digest, or the name if the image is not pinned."""
    return image.rpartition(" ")[2]


def say(image: str) -> str:
    """A short form for messages: the name and the start of the digest."""
    digest = digest_of(image)
    return f"{name_of(image)} ({digest[:19]}…)" if digest else name_of(image)


def made_by(image: str, profile: str) -> str:
    """What a result depends on besides the job itself: the image, how the worker runs programs, and our version."""
    return f"{image} {profile} {version()}"
