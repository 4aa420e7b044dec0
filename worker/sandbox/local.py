"""A sandbox made of plain processes, for machines without Docker: behind bubblewrap's walls, where it is installed.

Behind walls a command has namespaces of its own: it sees the system's programs, read-only, and its working folder; no
network and no other process. In comparison with a container this is less: limits hold for each process instead of all
together, nothing is shared between two commands but the folder, and the machine's own programs are what there is.
"""

import asyncio
import itertools
import os
import resource
import secrets
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from schemas.errors import SandboxLost
from schemas.limits import Limits
from worker.sandbox.agent.filter import assemble
from worker.sandbox.agent.kernel import DESCRIPTORS, descendants
from worker.sandbox.base import SIDE, STDERR, STDOUT, Command, Hear, Outcome, Program, Running, Sandbox, Shape, Usage

FIRST_UID, UIDS = 1 << 20, 1 << 30
GULP = 1 << 15
SIGNALS = 64
"""A status of 128 and up to so many more is a signal, as bubblewrap tells it."""
BIND = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/fonts")
SHIFT = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.execvp(sys.argv[2], sys.argv[2:])"
"""Gives a command its third descriptor under the number that it expects."""
DRAIN_SECONDS, SAMPLE_SECONDS = 1.0, 0.1
CODE = "/code"
_numbers = itertools.count(1)
_HARNESS = """
import os, sys
def say(word): os.write({fd}, word)
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


def _folders() -> tuple[Path, Path]:
    """A place for files, not made yet, and one for scripts beside it."""
    root = Path(tempfile.mkdtemp(prefix="evalpool-"))
    root.chmod(0o711)
    (root / "code").mkdir(mode=0o755)
    return root / "work", root / "code"


def usage(pids: set[int]) -> Usage:
    """Of these processes, as far as they still are there."""
    ticks = memory = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
            memory += int(words[21]) * resource.getpagesize()
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), memory, len(pids))


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
        self._folder, self._scripts = _folders()
        self._begin()

    async def run(self, program: Program) -> Outcome:
        limits, argv = program.limits, program.argv
        if not argv:
            report = self._put(".report", b"")
            fd = f"os.open({f'{self.home}/.report'!r}, os.O_WRONLY)"
            text = _HARNESS.format(fd=fd, source=program.code, check=program.check)
            argv = (self.python, "-c", text)
        command = Command(
            argv=(*argv, *program.args),
            env=program.env,
            files={program.main: program.code, **program.files},
            wall_seconds=limits.wall + program.patience,
            output_bytes=limits.output_bytes,
        )
        kept, total = {STDOUT: bytearray(), STDERR: bytearray()}, {STDOUT: 0, STDERR: 0}

        def hear(stream: int, data: bytes) -> None:
            total[stream] += len(data)
            kept[stream] += data[: limits.output_bytes - len(kept[stream])]

        running = self._spawn(command, hear, limits)
        running.feed(program.stdin, last=True)
        outcome = await running.over
        said = "" if program.argv else report.read_text()
        return Outcome(
            **vars(outcome) | {
                "ended": "cpu" if outcome.signal == signal.SIGXCPU else outcome.ended,
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
        return usage({pid for running in self._running for pid in (running.pid, *descendants(running.pid)) if pid})

    async def reset(self) -> bool:
        if self._folder is None:
            return False
        await self._stop()
        shutil.rmtree(self._folder)
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
            shutil.rmtree(folder.parent, ignore_errors=True)

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
        for path, content in command.files.items():
            self._put(f"{command.cwd or '.'}/{path}", content)
        argv, script, env = command.argv, None, {}
        if not argv:
            script = self._scripts / f"main-{secrets.token_hex(4)}.py"
            script.write_bytes(command.code)
            argv = (self.python, f"{CODE if self.walls else self._scripts}/{script.name}", *command.args)
            env = {"PYTHONPATH": self.home}  # as if the script lay there
        cwd = f"{self.home}/{command.cwd}"
        env |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self.home, "LANG": "C.UTF-8", **command.env}
        running = Local(self, command, hear, script)
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
        become: tuple[str, ...] = ()
        if self._uid is not None:  # we are root: the command must not be
            drop = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
            ids = (f"--reuid={self._uid}", f"--regid={self._uid}", "--clear-groups")
            become = ("setpriv", *ids, "--no-new-privs", "--inh-caps=-all", "--")
        return (
            str(bubblewrap()), "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", *drop, *binds,
            "--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/tmp", "--perms", "1777", "--tmpfs",
            "/box", "--ro-bind", str(self._scripts), CODE, "--bind", str(self._folder), self.home,
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

    def _put(self, path: str, content: bytes) -> Path:
        """A file of the command's own; a link that an earlier one left there is not followed."""
        if self._folder is None:
            raise SandboxLost("the sandbox is closed")
        target = self._folder / path
        if self._folder.resolve() not in (*target.resolve().parents, target.resolve()):
            raise SandboxLost(f"{path} is not in the sandbox")
        for folder in reversed(target.relative_to(self._folder).parents):
            (self._folder / folder).mkdir(exist_ok=True)
            self._own(self._folder / folder)
        with suppress(FileNotFoundError):
            target.unlink()
        target.write_bytes(content)
        self._own(target)
        return target

    def _own(self, path: Path) -> None:
        if self._uid is not None:
            os.chown(path, self._uid, self._uid, follow_symlinks=False)


class Local(Running):
    """A process of this machine."""

    def __init__(self, sandbox: LocalSandbox, command: Command, hear: Hear, script: Path | None) -> None:
        super().__init__()
        self._sandbox, self._command, self._hear, self._script = sandbox, command, hear, script
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._total = {STDOUT: 0, STDERR: 0, SIDE: 0}
        self._ended = "itself"
        self._stopped = asyncio.Event()
        self.pid = 0

    def begin(self, argv: tuple[str, ...], cwd: str, env: dict[str, str], limit: partial[None]) -> None:
        """On its way."""
        self._task = asyncio.create_task(self._go(argv, cwd, env, limit))

    def feed(self, data: bytes, *, last: bool = False) -> None:
        for part in (data, b"") if last else (data,):
            if part or last:
                self._input.put_nowait(part)

    def interrupt(self) -> None:
        for pid in descendants(self.pid) if self._sandbox.walls else (self.pid,):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def stop(self) -> None:
        self._end("stopped")

    def _end(self, how: str) -> None:
        if self._ended == "itself":
            self._ended = how
        self._stopped.set()

    async def _go(self, argv: tuple[str, ...], cwd: str, env: dict[str, str], limit: partial[None]) -> None:
        try:
            outcome = await self._process(argv, cwd, env, limit)
        except Exception as error:
            self.over.set_exception(SandboxLost(f"the command could not be run: {error}"))
        else:
            if self._sandbox.alive:
                self.over.set_result(outcome)
            else:
                self.over.set_exception(SandboxLost("the sandbox was closed"))
        finally:
            if self._script is not None:
                self._script.unlink(missing_ok=True)

    async def _process(self, argv: tuple[str, ...], cwd: str, env: dict[str, str], limit: partial[None]) -> Outcome:
        sandbox, side, passed = self._sandbox, -1, []
        if self._command.side:
            side, other = os.pipe()
            passed.append(other)
            argv = (sandbox.python, "-c", SHIFT, str(other), *argv)
        if sandbox.walls:
            passed.append(os.memfd_create("filter", 0))
            os.write(passed[-1], assemble())
            os.lseek(passed[-1], 0, os.SEEK_SET)
            argv = sandbox.wall(argv, cwd, passed[-1])
        started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, cwd="/" if sandbox.walls else cwd, env=env, start_new_session=True, preexec_fn=limit,
                pass_fds=passed, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:  # there is no such program: as a shell would say it
            self._hear(STDERR, f"{error.filename or argv[0]}: {error.strerror}\n".encode())
            return _outcome("itself", 127, started, before, self._total)
        finally:
            for fd in passed:
                os.close(fd)
        self.pid = process.pid
        assert process.stdout
        assert process.stderr
        pumps = [self._pump(process.stdout, STDOUT), self._pump(process.stderr, STDERR)]
        if side >= 0:
            reader = asyncio.StreamReader()
            pipe = os.fdopen(side, "rb", 0)
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
            pumps.append(self._pump(reader, SIDE))
        tasks = [asyncio.create_task(pump) for pump in (self._feed(process), *pumps)]
        stopped, over = asyncio.create_task(self._stopped.wait()), asyncio.create_task(process.wait())
        deadline, used = started + self._command.wall_seconds, Usage(0, 0, 0)
        while not (stopped.done() or over.done()):
            left = deadline - time.monotonic()
            if left <= 0:
                self._end("wall")
                break
            await asyncio.wait((stopped, over), timeout=min(left, SAMPLE_SECONDS), return_when=asyncio.FIRST_COMPLETED)
            now = usage({process.pid, *descendants(process.pid)})
            used = Usage(max(used.cpu_seconds, now.cpu_seconds), max(used.memory_bytes, now.memory_bytes), 1)
        with suppress(ProcessLookupError, PermissionError):  # behind walls, all the rest ends with the first
            os.killpg(process.pid, signal.SIGKILL)
        status = await over
        stopped.cancel()
        # What was written is read to the end; but one that left our group may hold the pipes for ever.
        await asyncio.wait(tasks[1:], timeout=DRAIN_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if sandbox.walls and 128 < status <= 128 + SIGNALS:
            status = 128 - status
        outcome = _outcome(self._ended, status, started, before, self._total)
        # Behind walls it is nobody's child that we could ask the kernel about: what was seen of it must do.
        return replace(outcome, cpu_seconds=max(outcome.cpu_seconds, used.cpu_seconds))

    async def _feed(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin
        with suppress(ConnectionError):
            while data := await self._input.get():
                process.stdin.write(data)
                await process.stdin.drain()
        process.stdin.close()

    async def _pump(self, reader: asyncio.StreamReader, stream: int) -> None:
        while data := await reader.read(GULP):
            room = self._command.output_bytes + 1 - self._total[stream]
            self._total[stream] += len(data)
            if room > 0:
                self._hear(stream, data[:room])
            if len(data) >= room:
                self._end("output")


def _outcome(ended: str, status: int, started: float, before: resource.struct_rusage, total: dict[int, int]) -> Outcome:
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Outcome(
        ended=ended,
        exit_code=status if status >= 0 else None,
        signal=-status if status < 0 else None,
        checked=False,
        said="",
        stdout=b"",
        stderr=b"",
        stdout_total=total[STDOUT],
        stderr_total=total[STDERR],
        wall_seconds=time.monotonic() - started,
        cpu_seconds=max(0.0, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
        memory_bytes=after.ru_maxrss << 10,
        oom_kills=0,
        processes=1,
    )
