"""Files into a sandbox and out of it: scripts of ours that run inside, as its own user."""

from typing import TYPE_CHECKING

from schemas.sandbox import ExecutionStatus
from worker.sandbox.base import Command
from worker.tools.files import ISOLATED, confined

if TYPE_CHECKING:
    from worker.library.box import BoxSandbox

UNPACK = """
import os, sys, tarfile
os.makedirs(sys.argv[1], exist_ok=True)
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|*") as archive:
    for entry in archive:
        if entry.name.startswith("/") or ".." in entry.name.split("/"):
            sys.exit(entry.name + " leads out of the folder")
        if entry.isfile() or entry.isdir() or entry.issym() or entry.islnk():
            entry.mode |= 0o700 if entry.isdir() else 0o600
            if entry.islnk():  # the other name may be there from an earlier time
                try: os.unlink(os.path.join(sys.argv[1], entry.name))
                except FileNotFoundError: pass
            archive.extract(entry, sys.argv[1])
"""

PACK = """
import os, sys, tarfile
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.GNU_FORMAT) as archive:
    todo = [""]
    while todo:
        name = todo.pop()
        path = os.path.join(sys.argv[1], name)
        entry = archive.gettarinfo(path, name)
        archive.inodes.clear()  # a file with two names is two files
        if entry is None or not (entry.isreg() or entry.isdir()):
            continue
        if not os.access(path, os.R_OK | os.X_OK * entry.isdir()):
            os.chmod(path, 0o700)  # it is ours, whatever it says
        if entry.isdir():
            todo += [os.path.join(name, each) for each in sorted(os.listdir(path), reverse=True)]
        if entry.isdir() and name:
            archive.addfile(entry)
        elif entry.isreg():
            with open(path, "rb") as file: archive.addfile(entry, file)
"""
WRITE = """
import os, sys
os.makedirs(os.path.dirname(sys.argv[1]) or ".", exist_ok=True)
with open(sys.argv[1], "wb") as file:
    while data := sys.stdin.buffer.read(1 << 20): file.write(data)
"""
READ = """
import os, stat, sys
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
if not stat.S_ISREG(os.fstat(fd).st_mode): sys.exit("it is not a regular file")
with open(fd, "rb") as file:
    while data := file.read(1 << 20): sys.stdout.buffer.write(data)
"""


async def run(sandbox: "BoxSandbox", code: str, name: str, path: str, data: bytes = b"") -> bytes:
    """A script, given a path and data; what it writes. `OSError` where it fails, `ValueError` for a path outside."""
    path = _inside(sandbox, name, path)
    command = Command(code=(ISOLATED + code).encode(), args=(path,), wall_seconds=sandbox.config.timeout)
    most = 2 * sandbox.config.resource_limits.disk_mib << 20  # all that can be there, and what an archive adds
    done = await sandbox.execute(command, data, encoding="latin-1", output_bytes=most)
    if done.status is not ExecutionStatus.SUCCESS:
        words = done.stderr.strip().splitlines()
        raise OSError(f"{path}: {words[-1] if words else done.status.value}")
    return done.stdout.encode("latin-1")


def _inside(sandbox: "BoxSandbox", name: str, path: str) -> str:
    """A path that is the sandbox's to write: in the working folder, or in `/tmp` where that stays."""
    home = sandbox.config.working_dir
    found = confined(path, home)
    if found is None and sandbox.keeps_tmp and confined(path, "/tmp") is not None:
        return path
    if found is None:
        raise ValueError(f"{name}: {path!r} is outside of {home}" + (" and /tmp" if sandbox.keeps_tmp else ""))
    return found
