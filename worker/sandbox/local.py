"""A sandbox made of plain processes, for machines without Docker: behind bubblewrap's walls, where it is installed.

Behind walls a command has namespaces of its own: it sees the system's programs, read-only, and its working folder; no
network and no other process. In comparison with a container this is less: limits hold for each process instead of all
together, nothing is shared between two commands but the folder, and the machine's own programs are what there is.
"""

import asyncio
import base64
import itertools
import json
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

from schemas.errors import SandboxLost
from schemas.limits import Limits
from worker.sandbox.agent.kernel import DESCRIPTORS
from worker.sandbox.base import SIDE, STDERR, STDOUT, Command, Hear, Outcome, Program, Running, Sandbox, Shape, Usage
from worker.sandbox.engine import start_time
from worker.sandbox.process import Local, usage

FIRST_UID, UIDS = 1 << 20, 1 << 30
BIND = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/fonts")
CODE = "/code"
CUSTOM = "import os, sys; sys.path.insert(0, os.getcwd())"
"""Read by the interpreter at its start: the scripts lie elsewhere, but their modules are where they work."""
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
_numbers = itertools.count(1)
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


@lru_cache(maxsize=1)
def bubblewrap() -> str | None:
    """Where it is, if it is here."""
    return shutil.which("bwrap")


def _space() -> str:
    """How our folders are called here: a pid means nothing in another namespace."""
    return f"evalpool-{Path('/proc/self/ns/pid').stat().st_ino}"


def _sweep() -> None:
    """What killed processes left of theirs goes."""
    for stale in Path(tempfile.gettempdir()).glob(f"{_space()}-*-*-*"):
        found = re.fullmatch(r"([0-9]{1,9})-([0-9]+)-.*", stale.name.removeprefix(f"{_space()}-"))
        if found and start_time(int(found[1])) != found[2]:
            _remove(stale)


def _folders() -> tuple[Path, Path]:
    """A place for files, not made yet, and one for scripts beside it."""
    root = Path(tempfile.mkdtemp(prefix=f"{_space()}-{os.getpid()}-{start_time(os.getpid())}-"))
    root.chmod(0o711)
    (root / "code").mkdir(mode=0o755)
    (root / "code" / "sitecustomize.py").write_text(CUSTOM)
    return root / "work", root / "code"


def _remove(folder: Path) -> bool:
    """A tree, however deep; whether it is gone."""
    return subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False).returncode == 0


class LocalSandbox(Sandbox):
    """A folder, and the processes that work in it. Without walls, only for what you would run yourself."""

    def __init__(self, shape: Shape, *, walls: bool) -> None:
        super().__init__(shape)
        self.walls = walls
        self._folder: Path | None = None
        self._scripts = Path()
        """Beside the folder, so that commands do not find each other's text there."""
        self._running: set[Local] = set()
        self._uid = FIRST_UID + secrets.randbelow(UIDS) if walls and os.getuid() == 0 else None

    @property
    def alive(self) -> bool:
        return self._folder is not None

    @property
    def home(self) -> str:
        """The working folder, by the name it has inside."""
        return self.shape.home if self.walls else str(self._folder)

    async def start(self) -> None:
        self.id = f"local-{os.getpid()}-{next(_numbers)}"
        self.image_digest = "local"
        await asyncio.to_thread(_sweep)
        self._folder, self._scripts = _folders()
        self._begin()

    async def run(self, program: Program) -> Outcome:
        limits, argv = program.limits, program.argv
        files = {program.main: program.code, **program.files}
        if not argv:
            argv, files = (self.python, "-c", _HARNESS.format(source=program.code, check=program.check)), program.files
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
                "ended": "cpu" if out else outcome.ended,
                "cpu_seconds": max(outcome.cpu_seconds, limits.cpu_seconds if out else 0),
                "checked": said == "checked",
                "said": said if said != "checked" else "",
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
        if self._folder is None:
            return False
        await self._stop()
        gone = await asyncio.to_thread(_remove, self._folder)
        if not gone or self._folder is None:  # it may have been closed meanwhile
            return False
        self._begin()
        return True

    def _begin(self) -> None:
        assert self._folder is not None
        self._folder.mkdir(mode=0o700)
        self._own(self._folder)

    async def close(self) -> None:
        folder, self._folder = self._folder, None
        await self._stop()
        if folder is not None:
            await asyncio.to_thread(_remove, folder.parent)

    @property
    def python(self) -> str:
        """The interpreter inside."""
        return "python3" if self.walls else sys.executable

    async def _stop(self) -> None:
        for running in list(self._running):
            running.stop()
            with suppress(SandboxLost):
                await asyncio.shield(running.over)

    def _spawn(self, command: Command, hear: Hear, limits: Limits | None) -> "Local":
        if self._folder is None:
            raise SandboxLost("the sandbox is closed")
        self.uses += 1
        code, number, scripts = str(CODE if self.walls else self._scripts), secrets.token_hex(4), []
        argv, cwd, env = command.argv, f"{self.home}/{command.cwd}", {}
        if not argv:
            scripts.append(self._scripts / f"main-{number}.py")
            scripts[-1].write_bytes(command.code)
            argv, env = (
                (self.python, f"{code}/main-{number}.py", *command.args),
                {"PYTHONPATH": code, "PYTHONNOUSERSITE": "1"},
            )
        if command.files:  # written inside, by whom they are for: out here, a link could lead us anywhere
            scripts.append(self._scripts / f"files-{number}.json")
            files = {path: base64.b64encode(content).decode() for path, content in command.files.items()}
            scripts[-1].write_text(json.dumps(files))
            argv, cwd = (self.python, "-I", "-c", PLACE, f"{code}/files-{number}.json", cwd, *argv), self.home
        env |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self.home, "LANG": "C.UTF-8", **command.env}
        running = Local(self, command, hear, scripts)
        running.begin(argv, cwd, env, partial(self._limit, limits))
        self._running.add(running)
        running.over.add_done_callback(lambda _: self._running.discard(running))
        return running

    def wall(self, argv: tuple[str, ...], cwd: str, filter_fd: int) -> tuple[str, ...]:
        """The command, behind bubblewrap if there are to be walls."""
        if not self.walls:
            return argv
        binds = [word for path in BIND for word in ("--ro-bind-try", path, path)]
        drop: tuple[str, ...] = ("--unshare-user",)
        become: tuple[str, ...] = ("prlimit", f"--nproc={self.shape.processes}")  # in a namespace that has no others
        small = ("--perms", "1777", "--size", str(self.shape.disk_mib << 20), "--tmpfs")
        if self._uid is not None:  # we are root: the command must not be
            drop = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
            ids = (f"--reuid={self._uid}", f"--regid={self._uid}", "--clear-groups")
            become = ("setpriv", *ids, "--no-new-privs", "--inh-caps=-all", "--")
        return (
            str(bubblewrap()), "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", *drop,
            "--perms", "0755", "--dir", "/etc", *binds,
            "--proc", "/proc", "--dev", "/dev", *small, "/tmp", *small, "/box",
            "--ro-bind", str(self._scripts), CODE, "--bind", str(self._folder), self.home,
            "--hostname", "sandbox", "--die-with-parent", "--seccomp", str(filter_fd), "--", *become,
            "env", "-C", cwd, *argv,
        )  # fmt: skip

    def _limit(self, limits: Limits | None) -> None:
        """In the new process: what one process may use, for want of a count over all of them."""

        def most(name: int, value: int) -> None:
            hard = resource.getrlimit(name)[1]
            value = value if hard < 0 else min(value, hard)
            resource.setrlimit(name, (value, value))

        most(resource.RLIMIT_CORE, 0)
        if limits is not None:
            seconds = max(1, round(limits.cpu_seconds + 0.499))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        if self.walls:
            most(resource.RLIMIT_DATA, self.shape.memory_mib << 20)
            most(resource.RLIMIT_FSIZE, self.shape.disk_mib << 20)
            most(resource.RLIMIT_NOFILE, DESCRIPTORS)
            if self._uid is not None:  # else it would count all that its user does
                most(resource.RLIMIT_NPROC, self.shape.processes)

    def _own(self, path: Path) -> None:
        if self._uid is not None:
            os.chown(path, self._uid, self._uid, follow_symlinks=False)
