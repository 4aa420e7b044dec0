"""Folders of the host that a sandbox works on: copied in, and copied back. Nothing of the host is ever mounted."""

import asyncio
import io
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.errors import SandboxLost
from worker.tools.files import confined

if TYPE_CHECKING:
    from worker.library.box import BoxSandbox

Volumes = dict[str, dict[str, str]]


async def copy_in(sandbox: "BoxSandbox", volumes: Volumes) -> None:
    """At the start."""
    for path, mount in volumes.items():
        await asyncio.to_thread(_ready, Path(path), mount.get("mode", "rw"))
        await sandbox.put_dir(path, mount["bind"])


async def copy_out(sandbox: "BoxSandbox", volumes: Volumes) -> None:
    """At the stop. What comes out of a sandbox is not trusted: plain files and folders, no more than fit into it."""
    for path, mount in volumes.items():
        if mount.get("mode", "rw") != "rw":
            continue
        inside = confined(mount["bind"], sandbox.config.working_dir) or "."
        data = await sandbox.get_archive(inside)
        await asyncio.to_thread(_unpack, data, Path(path))


def _ready(source: Path, mode: str) -> None:
    if mode == "rw":  # what is to be written to may not be there yet
        source.expanduser().mkdir(parents=True, exist_ok=True)


def _unpack(data: bytes, target: Path) -> None:
    """Beside the target first: a broken archive changes nothing."""
    target = target.expanduser()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".evalpool-") as aside:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for entry in archive:
                path = Path(aside, entry.name)
                if entry.name.startswith("/") or ".." in path.parts or not (entry.isfile() or entry.isdir()):
                    raise SandboxLost(f"{entry.name!r} is not what a folder can have in it")
                if entry.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                elif content := archive.extractfile(entry):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.read())
        shutil.copytree(aside, target, dirs_exist_ok=True)
