"""Copies files into a sandbox and out of it, with scripts that run inside as the sandbox's own user."""

from evalpool.schemas.errors import InvalidCall
from evalpool.schemas.sandbox import CommandResult, ExecutionStatus
from evalpool.worker.sandbox.base import Command
from evalpool.worker.tools.files import INSIDE, ISOLATED, confined

LAST_WORDS = 1000
"""How many characters at the end of a script's error output are read. A program inside may have written far more."""
UNPACK = """
import os, sys, tarfile
os.makedirs(sys.argv[1], exist_ok=True)
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|*") as archive:
    for entry in archive:
        if entry.name.startswith("/") or ".." in entry.name.split("/"):
            sys.exit(entry.name + " is outside the folder")
        if entry.isfile() or entry.isdir() or entry.issym() or entry.islnk():
            entry.mode |= 0o700 if entry.isdir() else 0o600
            if entry.islnk():  # an earlier upload may have left a file by this name
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
            os.chmod(path, 0o700)  # allowed, since the file is our own
        if entry.isdir():
            todo += [os.path.join(name, each) for each in sorted(os.listdir(path), reverse=True)]
        if entry.isdir() and name:
            archive.addfile(entry)
        elif entry.isreg():
            with open(path, "rb") as file: archive.addfile(entry, file)
"""
WRITE = "sys.argv.insert(1, 'write')\n" + INSIDE
"""Writes as the file tool does: no link is followed, and a write that fails changes nothing."""
READ = """
import os, stat, sys
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
if not stat.S_ISREG(os.fstat(fd).st_mode): sys.exit("it is not a regular file")
with open(fd, "rb") as file:
    while data := file.read(1 << 20): sys.stdout.buffer.write(data)
"""


def command(script: str, path: str, seconds: float) -> Command:
    """Return the command that runs one of the scripts on a path, for at most so many seconds."""
    return Command(code=(ISOLATED + script).encode(), args=(path,), wall_seconds=seconds)


def output(path: str, done: CommandResult) -> bytes:
    """Return what a script has written. Raises `OSError` with the last line of its error output if it failed."""
    if done.status is not ExecutionStatus.SUCCESS:
        words = done.stderr[-LAST_WORDS:].strip().splitlines()
        raise OSError(f"{path}: {words[-1].removeprefix(f'{path}: ') if words else done.status.value}")
    return done.stdout.encode("latin-1")


def inside(field: str, path: str, home: str, *, tmp: bool) -> str:
    """Return the path if it is in the working folder, or in `/tmp` if `tmp` is set. Raises `InvalidCall` otherwise."""
    if not isinstance(path, str):
        raise InvalidCall(f"{field}: it must be a path as text, not {type(path).__name__}")
    found = confined(path, home)
    if found is None and tmp and confined(path, "/tmp") is not None:
        return path
    if found is None:
        raise InvalidCall(f"{field}: {path!r} is outside of {home}" + (" and /tmp" if tmp else ""))
    return found
