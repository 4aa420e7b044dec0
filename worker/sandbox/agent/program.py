"""The job's side of the fork: from a copy of the agent to the program, as another user, nothing of ours in reach."""

import json
import os
import signal
from typing import Any

from . import interpreter, kernel

HOME = "/box"
"""The program's working directory."""
REPORT, SEALED = 3, 4
"""Where the harness finds its two pipes; a program without a harness gets neither."""
BORN = b"born "
"""What the report begins with once the program is confined. It is written before the program's first line, and nobody
can take it back: an end without it is a failure of ours."""
NOTHING: dict[str, Any] = {"argv": [], "args": [], "env": {}, "files": []}
"""What most programs are given besides their code and their input."""
COLD = (
    "import sys, types; m = types.ModuleType('evalpool_agent'); exec(sys.argv[1], vars(m)); "
    "m.run(sys.argv[2:], %d, %d, None, *%r)"
)
"""What a cold interpreter is started with: the harness is its first argument."""


class Job:
    """What the worker sent for one run, read only here, after the fork."""

    def __init__(
        self,
        uid: int,
        world: interpreter.World,
        cold_source: str,
        meta: dict[str, object],
        fds: tuple[int, ...],
        body: memoryview,
        problem: str,
    ) -> None:
        self.uid, self.world, self.cold_source = uid, world, cold_source
        self.fds, self.body, self.problem = fds, body, problem
        self.limits: dict[str, float] = meta["limits"]  # type: ignore[assignment]
        self.checked = bool(meta["checked"])
        self.told: list[Any] = [meta["tools"], meta["guarded"], meta["subject"]]
        self.sizes: list[int] = meta["sizes"]  # type: ignore[assignment]
        self.home, self.side = str(meta.get("cwd") or HOME), bool(meta.get("side"))
        if meta.get("file"):
            self.told.append(meta["file"])

    def become(self) -> None:
        """The program, to its end."""
        self._confine(self.fds)
        given = json.loads(bytes(self.body[: self.sizes[0]])) if self.sizes[0] else NOTHING
        argv, args = given["argv"], given["args"]
        os.environ.update(given["env"])
        os.write(REPORT, BORN)
        if self.problem:
            raise OSError(self.problem)
        self._put(given["files"])
        if not argv:
            interpreter.run(args, REPORT, SEALED if self.checked else -1, self.world, *self.told)
        for ignored in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # by us or by Python; not after a login
            signal.signal(ignored, signal.SIG_DFL)
        if self.side:
            os.set_inheritable(REPORT, True)
        if argv == ["python3"]:  # a cold interpreter, but the same harness
            os.set_inheritable(REPORT, True)
            os.set_inheritable(SEALED, True)
            argv = ["python3", "-c", COLD % (REPORT, SEALED if self.checked else -1, self.told), self.cold_source]
        try:
            os.execvpe(argv[0], [*argv, *args], os.environ)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)

    def _confine(self, fds: tuple[int, ...]) -> None:
        """Leave everything of the agent behind but the streams and the harness's two pipes."""
        os.setsid()
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"1000")  # when memory runs out, the program goes, never the agent
        for number, fd in enumerate(fds):  # which are all above these numbers: the agent holds them
            os.dup2(fd, number, inheritable=number < REPORT)
        os.closerange(len(fds), kernel.DESCRIPTORS)
        try:
            for fd in range(REPORT):
                os.fchmod(fd, 0o666)  # so that /dev/stdout and its like can be opened, as anywhere
        except OSError:
            pass  # gVisor will not
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # the worker may have put us above what we watch
        kernel.set_limits(self.limits)
        kernel.become(self.uid)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # as after an exec: /dev/stdout and /proc/self work
        if self.sizes[3:]:  # the folder of its files may not be there yet
            os.makedirs(self.home, exist_ok=True)
        os.chdir(self.home)

    def _put(self, paths: list[str]) -> None:
        """The files that go with the program."""
        start = sum(self.sizes[:3])
        for path, size in zip(paths, self.sizes[3:], strict=True):
            if folder := os.path.dirname(path):
                os.makedirs(folder, exist_ok=True)
            with open(path, "wb") as target:
                target.write(self.body[start : start + size])
            start += size
