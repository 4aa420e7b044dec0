"""The job's side of the fork: from a copy of the agent to the program, as another user, nothing of ours in reach."""

import contextlib
import json
import os
import signal

from . import interpreter, kernel
from .filter import Filter

HOME = "/box"
"""The program's working directory."""
REPORT, SEALED = 3, 4
"""Where the harness finds its two pipes; a program without a harness gets neither."""
BORN = b"born "
"""What the report begins with once the program is confined. It is written before the program's first line, and nobody
can take it back: an end without it is a failure of ours."""
COLD = (
    "import sys, types; m = types.ModuleType('evalpool_agent'); exec(sys.argv[1], vars(m)); m.run(sys.argv[2:], %d, %d)"
)
"""What a cold interpreter is started with: the harness is its first argument."""


class Job:
    """What the worker sent for one run, read only here, after the fork."""

    def __init__(
        self, uid: int, seccomp: Filter, cold_source: str, meta: dict[str, object], body: memoryview, problem: str
    ) -> None:
        self.uid, self.seccomp, self.cold_source, self.problem = uid, seccomp, cold_source, problem
        self.limits: dict[str, float] = meta["limits"]  # type: ignore[assignment]
        self.checked = bool(meta["checked"])
        sizes: list[int] = meta["sizes"]  # type: ignore[assignment]
        self.given = json.loads(bytes(body[: sizes[0]]))
        self.files, start = [], sum(sizes[:3])
        for path, size in zip(self.given["files"], sizes[3:], strict=True):
            self.files.append((path, body[start : start + size]))
            start += size

    def become(self, stdin: int, stdout: int, stderr: int, report: int, sealed: int) -> None:
        """The program, to its end."""
        self._confine((stdin, stdout, stderr, report, sealed))
        os.write(REPORT, BORN)
        if self.problem:
            raise OSError(self.problem)
        for path, content in self.files:
            if folder := os.path.dirname(path):
                os.makedirs(folder, exist_ok=True)
            with open(path, "wb") as target:
                target.write(content)
        argv: list[str] = self.given["argv"]
        args: list[str] = self.given["args"]
        if not argv:
            interpreter.run(args, REPORT, SEALED if self.checked else -1)
        for ignored in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # by us or by Python; not after a login
            signal.signal(ignored, signal.SIG_DFL)
        if argv == ["python3"]:  # a cold interpreter, but the same harness
            os.set_inheritable(REPORT, True)
            os.set_inheritable(SEALED, True)
            argv = ["python3", "-c", COLD % (REPORT, SEALED if self.checked else -1), self.cold_source]
        try:
            os.execvpe(argv[0], [*argv, *args], os.environ)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)

    def _confine(self, fds: tuple[int, ...]) -> None:
        """Leave everything of the agent behind but the streams and the harness's two pipes."""
        os.setsid()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # when memory runs out, the program goes, never the agent
        for fd in fds[:REPORT]:
            with contextlib.suppress(OSError):  # gVisor will not
                os.fchmod(fd, 0o666)  # so that /dev/stdout and its like can be opened, as anywhere
        high = [os.dup(fd) for fd in fds]  # first out of the way of the numbers they are to have
        for number, fd in enumerate(high):
            os.dup2(fd, number, inheritable=number < REPORT)
        os.closerange(len(fds), 1024)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(0o022)
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # the worker may have put us above what we watch
        kernel.set_limits(self.limits)
        kernel.become(self.uid)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # as after an exec: /dev/stdout and /proc/self work
        os.chdir(HOME)
        os.environ.clear()
        os.environ.update(self.given["env"])
        self.seccomp.install()
