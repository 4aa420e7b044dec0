"""Files that only their owner may read: rows and logs contain programs, their inputs and their outputs."""

import os
from contextlib import suppress
from pathlib import Path

from evalpool.schemas.errors import SetupError


def private_folder(path: Path) -> None:
    """Create a folder, and its missing parents, for this user only. An existing folder keeps its mode, since it may be
    shared on purpose. Raises `SetupError` for a missing folder directly below `/`, since such a path is mostly a
    mistake."""
    if path.is_dir():
        return
    if path.parent == path.absolute().parents[-1]:
        raise SetupError(
            f"the folder {path} does not exist: create it, or set EVALPOOL_STATE_DIR or EVALPOOL_DATABASE_URL to "
            "another place"
        )
    private_folder(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(0o700)  # whatever the umask


def private_file(path: Path) -> None:
    """Create a file that only this user can read, or change the mode of an existing one accordingly."""
    private_folder(path.parent)
    # An existing file is not opened: closing it again would drop the locks that SQLite holds on it in this process.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    _narrow(path)


def private_database(path: Path) -> None:
    """Make a SQLite file, and the files that SQLite keeps beside it, private. SQLite creates later ones with the mode
    of the database. Raises `SetupError` if the file cannot be created."""
    if str(path).startswith("file:"):  # not a path but a SQLite URI, whose author takes care of the file
        return
    try:
        private_file(path)
    except OSError as error:
        raise SetupError(
            f"the database {path} cannot be created ({error.strerror}): set EVALPOOL_STATE_DIR or EVALPOOL_DATABASE_URL"
        ) from None
    for suffix in ("-wal", "-shm", "-journal"):
        _narrow(path.with_name(path.name + suffix))


def _narrow(path: Path) -> None:
    with suppress(OSError):  # the file does not exist, or belongs to another user
        path.chmod(0o600)
