"""Which evalpool this is."""

from functools import lru_cache
from importlib import metadata


@lru_cache(maxsize=1)
def version() -> str:
    """As installed; a file is read for it, so once."""
    try:
        return metadata.version("evalpool")
    except metadata.PackageNotFoundError:
        return "unknown: evalpool runs from its source, without being installed"
