"""The job's side of the fork: from a copy of the agent to the program, as another user, nothing of ours in reach."""

import gc
import json
import os
import signal
import sys
from typing import Any

from . import interpreter, kernel
from .wire import Given, Run, Start
from .words import BORN, COLD, HOME

REPORT, SEALED = 3, 4
"""The descriptors of the harness's two pipes; a program without a harness gets neither."""
RANDOM = ("numpy.random", "torch")
"""Modules with a generator of random numbers that, unlike Python's own, is not seeded anew after a fork. Where they are
preloaded, every program would see the same numbers."""
GENERATORS: "list[Any]" = []
"""Generators of random numbers that libraries have made for themselves at their import; they are seeded anew, too."""
NOTHING: Given = {"argv": [], "args": [], "env": {}, "files": []}
"""What is given to most programs, for which nothing is sent."""
HARNESS = (
    "import sys, types; m = types.ModuleType('evalpool_agent'); exec(sys.argv[1], vars(m)); "
    "m.run(sys.argv[2:], %d, %d, None, *%r)"
)
"""The command of a cold interpreter, whose first argument is the text of the harness."""


def find_generators() -> None:
    """Look for the generators of the modules that have been imported, except the one that Python itself seeds anew."""
    module = sys.modules.get("random")
    if module is not None:
        known = (module._inst, *GENERATORS)
        for each in gc.get_objects():
            if isinstance(each, module.Random) and not any(each is one for one in known):
                GENERATORS.append(each)


def seed() -> None:
    """Seed those generators anew, before a fork: in the child, every page that this touches would have to be copied."""
    for name in RANDOM:
        if name in sys.modules:
            sys.modules[name].seed()
    for generator in GENERATORS:
        generator.seed()


class Job:
    """One run as the worker sent it; its raw part is read only here, after the fork."""

    def __init__(
        self,
        uid: int,
        world: interpreter.World,
        cold_source: str,
        meta: "Run | Start",
        fds: tuple[int, ...],
        body: memoryview,
        problem: str,
    ) -> None:
        self.uid, self.world, self.cold_source = uid, world, cold_source
        self.fds, self.body, self.problem = fds, body, problem
        self.limits, self.checked, self.sizes = meta["limits"], meta["checked"], meta["sizes"]
        self.told: list[Any] = [meta["tools"], meta["guarded"], meta["subject"], self.limits]
        self.home, self.side = str(meta.get("cwd") or HOME), bool(meta.get("side"))
        if file := meta.get("file"):
            self.told.append(file)

    def become(self) -> None:
        """Become the program and run it to its end. Never returns; raises if the program cannot be started."""
        self._confine(self.fds)
        start, size = sum(self.sizes[:-2]), self.sizes[-2]
        given: Given = json.loads(bytes(self.body[start : start + size])) if size else NOTHING
        argv, args = [*given["argv"]], [*given["args"]]
        os.environ.update(given["env"])
        os.write(REPORT, BORN)
        if self.problem:
            raise OSError(self.problem)
        self._put(given["files"])
        if not argv:
            interpreter.run(args, REPORT, SEALED if self.checked else -1, self.world, *self.told)
        self._execute(argv, args)

    def _execute(self, argv: list[str], args: list[str]) -> None:
        """Become another program, or end with 127 as a shell does. Never returns."""
        for ignored in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # by us or by Python; not after a login
            signal.signal(ignored, signal.SIG_DFL)
        if self.side:
            os.set_inheritable(REPORT, True)
        if argv == [COLD]:  # a cold interpreter, but the same harness
            os.set_inheritable(REPORT, True)
            os.set_inheritable(SEALED, True)
            argv = [COLD, "-c", HARNESS % (REPORT, SEALED if self.checked else -1, self.told), self.cold_source]
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
        if self.sizes[1:-2]:  # the folder of its files may not be there yet
            os.makedirs(self.home, exist_ok=True)
        os.chdir(self.home)

    def _put(self, paths: list[str]) -> None:
        """Write the files that go with the program, as its user.

        The agent writes the program itself before the fork (`wire.put`), as root and only where nothing is yet, so that
        no job can change it. These files belong to the job: it may replace them, and a link among them can lead no
        further than the job itself could go.
        """
        start = self.sizes[0]
        for path, size in zip(paths, self.sizes[1:-2], strict=True):
            if folder := os.path.dirname(path):
                os.makedirs(folder, exist_ok=True)
            with open(path, "wb") as target:
                target.write(self.body[start : start + size])
            start += size
