"""A sandbox made of plain processes, for machines without Docker: behind bubblewrap's walls, where it is installed.

Behind walls a command has namespaces of its own: it sees the system's programs, read-only, and its working folder, but
no network and no other process. This is less than a container offers: limits hold for each process and not for all of
them together, two commands share nothing but the folder, and the only programs are those of the machine.
"""

import asyncio
import base64
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from evalpool.schemas.errors import SandboxLost
from evalpool.schemas.limits import Limits
from evalpool.worker.sandbox.base import (
    EXECUTE,
    SIDE,
    STDERR,
    STDOUT,
    Box,
    Command,
    End,
    Hear,
    Note,
    Outcome,
    Program,
    Running,
    Shape,
    Usage,
)
from evalpool.worker.sandbox.engine import start_time
from evalpool.worker.sandbox.hardening import new_uid
from evalpool.worker.sandbox.process import Folders, Launch, Process, usage
from evalpool.worker.sandbox.walls import CODE

CUSTOM = "import os, sys; sys.path.insert(0, os.getcwd())"
"""Read by the interpreter at its start: scripts lie in another folder, but their modules are where they work."""
PLACE = """
import base64, json, os, sys
files, folder, *argv = sys.argv[1:]
os.makedirs(folder, exist_ok=True)
os.chdir(folder)
for path, data in json.load(open(files)).items():
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file: file.write(base64.b64decode(data))
try: os.execvp(argv[0], argv)
except OSError as error: sys.exit(f"{argv[0]}: {error.strerror}")
"""
"""Writes a command's files and becomes the command. It runs inside and as the command's user, as the agent's own way of
doing it does (`program.Job`), because a link in the folder could lead a write from outside anywhere."""
_HARNESS = """
import os, sys
def say(word): os.write(3, word)
main = sys.modules["__main__"]
source, check = {source!r}, {check!r}
try: code = compile(source, "main.py", "exec")
except (SyntaxError, ValueError): say(b"syntax"); raise
try: exec(code, vars(main))
except SystemExit: raise
except MemoryError: say(b"memory"); raise
except BaseException: say(b"raised"); raise
if check is not None:
    try: exec(compile(check, "check.py", "exec"), vars(main)); say(b"checked")
    except SystemExit: raise
    except AssertionError: say(b"assertion"); raise
    except BaseException: say(b"raised"); raise
"""
"""Runs a Python program and its check, and says on descriptor 3 how that ended."""
_numbers = itertools.count(1)


class LocalBox(Box):
    """A folder and the processes that work in it. Without walls, use it only for programs that you trust."""

    def __init__(self, shape: Shape, *, walls: bool) -> None:
        super().__init__(shape)
        self.walls = walls
        self._folders: Folders | None = None
        """None before the start and after the end."""
        self.uid = new_uid() if walls and os.getuid() == 0 else None
        """The user that commands run as; None for the worker's own."""
        self._running: set[Process] = set()

    @property
    def alive(self) -> bool:
        return self._folders is not None

    @property
    def home(self) -> str:
        """The working folder, by the name that it has inside."""
        return self.shape.home if self.walls else str(self._open().work)

    @property
    def python(self) -> str:
        """The command that starts the interpreter inside."""
        return "python3" if self.walls else sys.executable

    async def start(self) -> None:
        self.id = f"local-{os.getpid()}-{next(_numbers)}"
        self.image_digest = "local"
        await asyncio.to_thread(_sweep)
        self._folders = _folders()
        self._begin()

    async def limit(self, shape: Shape) -> bool:
        self.shape = shape  # each command has limits of its own, which are set at its start
        return self.alive

    async def run(self, program: Program) -> Outcome:
        limits, argv = program.limits, program.argv
        files = {program.main: program.code, **program.files}
        if not argv:
            argv, files = (self.python, "-c", _HARNESS.format(source=program.code, check=program.check)), program.files
        if program.executable:
            argv = (*EXECUTE, program.main, *argv)
        command = Command(
            argv=(*argv, *program.args),
            env=program.env,
            files=files,
            side=not program.argv,
            wall_seconds=limits.wall + program.patience,
            output_bytes=limits.output_bytes,
        )
        kept, total = (
            {stream: bytearray() for stream in (STDOUT, STDERR, SIDE)},
            dict.fromkeys((STDOUT, STDERR, SIDE), 0),
        )

        def hear(stream: int, data: bytes) -> None:
            total[stream] += len(data)
            kept[stream] += data if stream == SIDE else data[: limits.output_bytes - len(kept[stream])]

        running = self._spawn(command, hear, limits)
        running.feed(program.stdin, last=True)
        outcome = await running.over
        said, out = kept[SIDE].decode("ascii", "replace"), outcome.signal == signal.SIGXCPU
        return Outcome(
            **vars(outcome) | {
                "ended": End.CPU if out else outcome.ended,
                "cpu_seconds": max(outcome.cpu_seconds, limits.cpu_seconds if out else 0),
                "checked": said == "checked",
                "note": Note.of(said),
                "stdout": bytes(kept[STDOUT]),
                "stderr": bytes(kept[STDERR]),
                "stdout_total": total[STDOUT],
                "stderr_total": total[STDERR],
            }
        )  # fmt: skip

    def spawn(self, command: Command, hear: Hear) -> Running:
        return self._spawn(command, hear, None)

    def usage(self) -> Usage:
        return usage({pid for running in self._running for pid in running.processes()})

    async def reset(self) -> bool:
        if self._folders is None:
            return False
        await self._stop()
        gone = await asyncio.to_thread(_remove, self._open().work)
        if not gone or self._folders is None:  # it may have been closed meanwhile
            return False
        self._begin()
        return True

    async def close(self) -> None:
        folders, self._folders = self._folders, None
        await self._stop()
        if folders is not None:
            await asyncio.to_thread(_remove, folders.work.parent)

    def _open(self) -> Folders:
        if self._folders is None:
            raise SandboxLost("the sandbox is closed")
        return self._folders

    def _begin(self) -> None:
        work = self._open().work
        work.mkdir(mode=0o700)
        if self.uid is not None:
            os.chown(work, self.uid, self.uid, follow_symlinks=False)

    async def _stop(self) -> None:
        for running in list(self._running):
            running.stop()
            with suppress(SandboxLost):
                await asyncio.shield(running.over)

    def _spawn(self, command: Command, hear: Hear, limits: Limits | None) -> Process:
        folders = self._open()
        self.uses += 1
        code, number, scripts = str(CODE if self.walls else folders.scripts), secrets.token_hex(4), []
        argv, cwd, env = command.argv, f"{self.home}/{command.cwd}", {}
        if not argv:
            scripts.append(folders.scripts / f"main-{number}.py")
            scripts[-1].write_bytes(command.code)
            argv, env = (
                (self.python, f"{code}/main-{number}.py", *command.args),
                {"PYTHONPATH": code, "PYTHONNOUSERSITE": "1"},
            )
        if command.files:
            scripts.append(folders.scripts / f"files-{number}.json")
            files = {path: base64.b64encode(content).decode() for path, content in command.files.items()}
            scripts[-1].write_text(json.dumps(files))
            argv, cwd = (self.python, "-I", "-c", PLACE, f"{code}/files-{number}.json", cwd, *argv), self.home
        env |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self.home, "LANG": "C.UTF-8", **command.env}
        shape = self.shape if self.walls else None
        launch = Launch(argv, cwd, env, folders, limits, scripts, self.python, shape, self.uid)
        running = Process(launch, command, hear, lambda: self.alive)
        self._running.add(running)
        running.over.add_done_callback(lambda _: self._running.discard(running))
        return running


def _space() -> str:
    """Return the first part of our folders' names, one for each namespace of pids, as a pid means nothing elsewhere."""
    return f"evalpool-{Path('/proc/self/ns/pid').stat().st_ino}"


def _sweep() -> None:
    """Remove the folders of processes that were killed."""
    for stale in Path(tempfile.gettempdir()).glob(f"{_space()}-*-*-*"):
        found = re.fullmatch(r"([0-9]{1,9})-([0-9]+)-.*", stale.name.removeprefix(f"{_space()}-"))
        if found and start_time(int(found[1])) != found[2]:
            _remove(stale)


def _folders() -> Folders:
    root = Path(tempfile.mkdtemp(prefix=f"{_space()}-{os.getpid()}-{start_time(os.getpid())}-"))
    root.chmod(0o711)
    (root / "code").mkdir(mode=0o755)
    (root / "code" / "sitecustomize.py").write_text(CUSTOM)
    return Folders(root / "work", root / "code")


def _remove(folder: Path) -> bool:
    """Remove a tree, however deep it is, and return whether it is gone."""
    return subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False).returncode == 0
