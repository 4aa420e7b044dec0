"""The version of evalpool."""

from functools import lru_cache
from importlib import metadata


@lru_cache(maxsize=1)
def version() -> str:
    """The version that is installed. It is read from a file, and only once."""
    try:
        return metadata.version("evalpool")
    except metadata.PackageNotFoundError:
        return "unknown: evalpool runs from its source, without being installed"
