"""Files that only their owner may read: rows and logs hold programs, their outputs and what they were asked."""

import os
from contextlib import suppress
from pathlib import Path

from schemas.errors import SetupError


def private_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone. One that is there already stays as it
    is: it may be shared on purpose."""
    if path.is_dir():
        return
    private_folder(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(0o700)  # whatever the umask


def private_file(path: Path) -> None:
    """Make a file, or narrow the one that is there, so that only this user can read it."""
    private_folder(path.parent)
    # An existing file is not opened: closing it again would drop the locks that SQLite holds on it in this process.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    _narrow(path)


def private_database(path: Path) -> None:
    """The same for a file of SQLite, and for those that it keeps beside it: new ones get the mode of the first."""
    if str(path).startswith("file:"):  # a URI with a syntax of its own; who writes one takes care of the file
        return
    try:
        private_file(path)
    except OSError as error:
        raise SetupError(
            f"the database {path} cannot be made ({error.strerror}): set EVALPOOL_STATE_DIR or EVALPOOL_DATABASE_URL"
        ) from None
    for suffix in ("-wal", "-shm", "-journal"):
        _narrow(path.with_name(path.name + suffix))


def _narrow(path: Path) -> None:
    with suppress(OSError):  # it is not there, or somebody else's and not ours to narrow
        path.chmod(0o600)
