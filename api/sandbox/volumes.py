"""Copies folders of the host into a sandbox, and back when it stops. Nothing of the host is ever mounted."""

import asyncio
import io
import os
import secrets
import shutil
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from evalpool.api.sandbox.box import BoxSandbox
from evalpool.worker.tools.files import confined

MOST_FILES = 100_000
"""Entries of an archive that are copied back, at most."""
LONG_NAME = 1 << 13
"""Bytes that a path in an archive may have."""
Volumes = dict[str, dict[str, str]]
"""Folder of the host → `bind`, the folder in the sandbox, and `mode`, which is `rw` or `ro`."""


async def copy_in(sandbox: BoxSandbox, volumes: Volumes) -> None:
    """Copy the folders into a sandbox that has just started."""
    for path, mount in volumes.items():
        await asyncio.to_thread(_ready, Path(path), mount.get("mode", "rw"))
        await sandbox.put_dir(path, mount["bind"])


async def copy_out(sandbox: BoxSandbox, volumes: Volumes) -> None:
    """Copy the writable folders back, when no command runs any more."""
    for path, mount in volumes.items():
        if mount.get("mode", "rw") != "rw":
            continue
        inside = confined(mount["bind"], sandbox.config.working_dir) or "."
        data = await sandbox.get_archive(inside)
        most = 2 * sandbox.config.resource_limits.disk_mib << 20  # a file with two names is there twice
        await asyncio.to_thread(_unpack, data, Path(path), most)


def _ready(source: Path, mode: str) -> None:
    if mode == "rw":  # a folder for results may not exist yet
        source.expanduser().mkdir(parents=True, exist_ok=True)


def _unpack(data: bytes, target: Path, most: int) -> None:
    """Unpack an archive, which a program may have written, in a folder of the host. Only regular files and folders are
    written, never through a link, and at most `most` bytes."""
    _plain(data)
    left: list[str] = []
    top = os.open(target.expanduser(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for number, entry in enumerate(archive):
                parts = [part for part in entry.name.split("/") if part != "."]
                odd = entry.name.startswith("/") or "\0" in entry.name or not parts or not {"", ".."}.isdisjoint(parts)
                if odd or entry.issparse() or not (entry.isreg() or entry.isdir()) or number > MOST_FILES:
                    raise ValueError(f"{entry.name[:100]!r} cannot be copied")
                most -= entry.size
                if most < 0:
                    raise ValueError("more than the sandbox can hold")
                try:
                    if entry.isdir():
                        os.close(_folder(top, parts))
                    elif content := archive.extractfile(entry):
                        _write(top, parts, content, entry.mode)
                except OSError as error:  # the host's own file stays, and the other entries are copied
                    left.append(f"{entry.name[:100]!r} ({error.strerror})")
    finally:
        os.close(top)
    if left:
        raise OSError(f"{len(left)} entries could not be written, the first of them {left[0]}")


def _plain(data: bytes) -> None:
    """Refuse headers that our own script never writes, before the library reads them: some take it hours."""
    at = 0
    while any(header := data[at : at + tarfile.BLOCKSIZE]):
        kind, size = header[156:157], int(header[124:136].partition(b"\0")[0].strip() or b"0", 8)
        if kind not in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_LONGNAME):
            raise ValueError(f"an entry of the kind {kind!r} cannot be copied")
        if size < 0 or (size and kind == tarfile.DIRTYPE) or (size > LONG_NAME and kind == tarfile.GNUTYPE_LONGNAME):
            raise ValueError(f"an entry of {size} bytes cannot be copied")
        at += tarfile.BLOCKSIZE * (1 + -(-size // tarfile.BLOCKSIZE))


def _folder(top: int, parts: list[str]) -> int:
    """Open a folder below `top`, and create it if needed. Links are not followed, since they may lead anywhere."""
    fd = os.dup(top)
    for part in parts:
        try:
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=fd)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def _write(top: int, parts: list[str], content: IO[bytes], mode: int) -> None:
    """Write a file under a temporary name, and then rename it: an existing file or link is replaced, not followed."""
    folder, aside = _folder(top, parts[:-1]), f".evalpool-{secrets.token_hex(8)}"
    try:
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o777 | 0o600, dir_fd=folder)
        try:
            with os.fdopen(file, "wb") as target:
                shutil.copyfileobj(content, target)
            os.rename(aside, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(aside, dir_fd=folder)
            raise
    finally:
        os.close(folder)
