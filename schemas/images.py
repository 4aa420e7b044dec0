"""Which image a job runs in. It is decided when the job is submitted, and written as `NAME` or `NAME DIGEST`.

A name such as `evalpool/python:3.11` can be given to another image at any time; a digest cannot. A space separates the
two, since the name of an image cannot contain one.
"""

from schemas.job import JobSpec
from schemas.settings import Settings
from schemas.version import version


def wanted(spec: JobSpec, settings: Settings) -> str:
    """The name of the image that a job asks for, or that the settings choose for it."""
    if spec.image is not None:
        return spec.image
    if spec.tool == "notebook_executor":
        return settings.notebook_image
    return settings.image if spec.runs in ("python", "bash") else settings.code_image


def pinned(name: str, digest: str | None) -> str:
    """The image of this name with this digest; without one, the name alone."""
    return f"{name} {digest}" if digest else name


def name_of(image: str) -> str:
    """The name of the image, without its digest."""
    return image.partition(" ")[0]


def digest_of(image: str) -> str | None:
    """The digest of the image, or `None` if it is not pinned."""
    return image.partition(" ")[2] or None


def exact(image: str) -> str:
    """What to ask Docker for: the digest, or the name if the image is not pinned."""
    return image.rpartition(" ")[2]


def say(image: str) -> str:
    """A short form for messages: the name and the start of the digest."""
    digest = digest_of(image)
    return f"{name_of(image)} ({digest[:19]}…)" if digest else name_of(image)


def made_by(image: str, profile: str) -> str:
    """What a result depends on besides the job itself: the image, how the worker runs programs, and our version."""
    return f"{image} {profile} {version()}"
