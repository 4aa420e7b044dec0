"""A sandbox without walls, for tests of what lies above: trusted programs as plain subprocesses, same contract."""

import asyncio
import itertools
import math
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from schemas.errors import SandboxLost
from worker.sandbox.base import Outcome, Program, Sandbox, Shape

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


class FakeSandbox(Sandbox):
    """Runs what it is given right here. Never give it anything you would not run yourself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def alive(self) -> bool:
        return self._folder is not None

    async def start(self) -> None:
        self.id = f"fake-{next(_numbers)}"
        self.image_digest = "fake"
        self._folder = Path(tempfile.mkdtemp(prefix="evalpool-fake-"))

    async def run(self, program: Program) -> Outcome:
        if self._folder is None:
            raise SandboxLost("the sandbox is closed")
        self.uses += 1
        report, limits = self._folder / ".report", program.limits
        report.touch()
        for path, content in {program.main: program.code, **program.files}.items():
            (self._folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self._folder / path).write_bytes(content)
        argv = program.argv
        if not argv:
            fd = f"os.open({str(report)!r}, os.O_WRONLY)"
            argv = (sys.executable, "-c", _HARNESS.format(fd=fd, source=program.code, check=program.check))
        cpu_limit = math.ceil(limits.cpu_seconds)
        started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        self._process = await asyncio.create_subprocess_exec(
            *argv, *program.args, cwd=self._folder, env={"PATH": "/usr/bin:/bin", **program.env},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit, cpu_limit + 1)),
        )  # fmt: skip
        ended = "itself"
        talk = asyncio.create_task(self._process.communicate(program.stdin))
        try:
            stdout, stderr = await asyncio.wait_for(asyncio.shield(talk), limits.wall + program.patience)
        except TimeoutError:
            ended = "wall"
            self._process.kill()
            stdout, stderr = await talk
        if self._folder is None:
            raise SandboxLost("the sandbox was closed")
        after, code = resource.getrusage(resource.RUSAGE_CHILDREN), self._process.returncode or 0
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        cap, said = limits.output_bytes, report.read_text()
        return Outcome(
            ended="cpu" if code == -signal.SIGXCPU else ended,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            checked=said == "checked",
            said=said if said != "checked" else "",
            stdout=stdout[:cap],
            stderr=stderr[:cap],
            stdout_total=len(stdout),
            stderr_total=len(stderr),
            wall_seconds=time.monotonic() - started,
            cpu_seconds=cpu,
            memory_bytes=after.ru_maxrss << 10,
            oom_kills=0,
            processes=1,
        )

    async def reset(self) -> bool:
        if self._folder is None:
            return False
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        return True

    async def close(self) -> None:
        folder, self._folder = self._folder, None
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
