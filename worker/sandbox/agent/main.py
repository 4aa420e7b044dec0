"""The agent: process 1 of every sandbox.

Theory of operation. The container's command is a short bootstrap that reads this package from standard input, so
any image with a Python will do and nothing is mounted or copied. The agent then answers one request after another
on the attached stream: it forks a copy of itself, which drops to the job's user and becomes the program; the agent
feeds and reads it, stops it at its limits, kills whatever is left and replies; then it empties every writable place
and says in a second reply whether the sandbox is as at birth. Instead of a job it may be asked for a session, in which
files stay and commands run side by side (session.py); that reply comes at its end. When the worker dies, the stream
ends; so does the agent and with it, as process 1, the whole container.

It is the container's root with three capabilities: to become the job's user, its group, and to kill. Jobs run as
another user without any, so they can neither signal nor trace it, nor read its memory or its descriptors. What a
check must not be told (its text and its token) comes in a second frame, read only after the fork; whatever the agent
holds of a job lies in buffers that are wiped before the next one is forked from the same memory.
The worker trusts nothing of what it replies all the same.
"""

import fcntl
import gc
import importlib
import os
import signal
import sys

from . import interpreter, kernel, wire
from .filter import install
from .program import HOME, SEALED, Job
from .reset import Reset
from .session import Session
from .watch import Watch


class Agent:
    """One sandbox's worth of state: two descriptors, the job's user, the counters, and buffers that are wiped."""

    def __init__(self, config: dict[str, object]) -> None:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # else a job could open /proc/1/fd and speak in our name
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 1 gets no signal from inside that it does not handle
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("0")  # a job may lower its own: where we are let, it cannot get below ours
        except OSError:
            pass
        for name in [name for name in sys.modules if name.partition(".")[0] == "evalpool_agent"]:
            del sys.modules[name]  # no program shall find us there
        self.requests, self.replies, last_words = (
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, SEALED + 1) for fd in (0, 1, 2)
        )
        self.last_words = sys.stderr = os.fdopen(last_words, "w")  # for our own tracebacks; no job inherits it
        self.uid, self.cold_source = int(str(config["uid"])), str(config["cold"])
        os.environ.clear()
        os.environ.update(config["env"])  # type: ignore[call-overload]
        self.world = self.make_world()
        kernel.fence()
        known = install()
        self.counters, self.reset = kernel.Counters(), Reset(self.uid, str(config["home"]))
        self.body, self.sealed, self.stdout, self.stderr, self.report = (wire.Buffer() for _ in range(5))
        self.warm(config["preload"])  # type: ignore[arg-type]
        self.reply({"hello": config["version"], "python": sys.version.split()[0], "filter": known})

    def make_world(self) -> interpreter.World:
        """The program's streams, made over pipes as it will have; then nothing is left at its numbers."""
        ends = os.pipe()
        for fd in (0, 1, 2):
            os.dup2(ends[fd > 0], fd)
        world = interpreter.prepare()
        _, sys.stdin, sys.stdout, _ = world
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = world[1:]  # type: ignore[misc]
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(SEALED + 1):
            os.dup2(null, fd)
        return world

    def warm(self, modules: list[str]) -> None:
        """Import what jobs will want, then never let the collector touch it: a job's copy of it stays shared."""
        for name in modules:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()

    def serve(self) -> Job | None:
        """Answer requests until the stream ends. In a forked child it returns too: with the job to become."""
        while meta := wire.read_frame(self.requests, self.body):
            if meta.get("op") == "open":
                job = Session(self.requests, self.replies, self.body, self.counters, self.become).serve()
            else:
                job = self.run(meta)
            if job is not None:
                return job
            self.reply({"id": meta["id"], "dirty": self.reset.verify()})
        return None

    def run(self, meta: dict[str, object]) -> Job | None:
        """One program; in the child, what is to be done there."""
        sizes: list[int] = meta["sizes"]  # type: ignore[assignment]
        limits: dict[str, float] = meta["limits"]  # type: ignore[assignment]
        code_start, stdin_start = sizes[0], sizes[0] + sizes[1]
        path = f"{HOME}/{meta['main']}"
        problem = wire.put(path, self.body.view(code_start, stdin_start))
        (stdin_r, stdin_w), (stdout_r, stdout_w), (stderr_r, stderr_w), (report_r, report_w), (sealed_r, sealed_w) = (
            os.pipe() for _ in range(5)
        )
        watch = Watch(self.counters, self.requests, limits)
        pid = os.fork()
        if not pid:
            fds = stdin_r, stdout_w, stderr_w, report_w, sealed_r
            return self.become(meta, fds, problem)
        for fd in (stdin_r, stdout_w, stderr_w, report_w, sealed_r):
            os.close(fd)
        if meta["checked"] and wire.read_frame(self.requests, self.sealed) is None:
            os._exit(0)
        feeds = {stdin_w: self.body.view(stdin_start, stdin_start + sizes[2])}
        streams = {stdout_r: self.stdout, stderr_r: self.stderr, report_r: self.report}
        watch.run(pid, feeds, streams, report_r, {sealed_w: self.sealed.view()})
        self.reply(
            {
                "id": meta["id"],
                "ended": watch.ended,
                "exit_code": os.WEXITSTATUS(watch.status) if os.WIFEXITED(watch.status) else None,
                "signal": os.WTERMSIG(watch.status) if os.WIFSIGNALED(watch.status) else None,
                "said": bytes(self.report.view()).decode("ascii", "replace"),
                **watch.numbers(),
                "stdout": self.stdout.size,
                "stderr": self.stderr.size,
                "stdout_total": watch.total[stdout_r],
                "stderr_total": watch.total[stderr_r],
            },
            self.stdout,
            self.stderr,
        )
        for buffer in (self.body, self.sealed, self.stdout, self.stderr, self.report):
            buffer.clear()
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass  # there was no room for it
        return None

    def become(self, meta: dict[str, object], fds: tuple[int, ...], problem: str) -> Job:
        """In a forked child: what it is to be."""
        return Job(self.uid, self.world, self.cold_source, meta, fds, self.body.view(), problem)

    def reply(self, meta: dict[str, object], *parts: wire.Buffer) -> None:
        """One frame."""
        wire.write_all(self.replies, wire.pack(meta, sum(part.size for part in parts)))
        for part in parts:
            wire.write_all(self.replies, part.view())


def main(config: dict[str, object]) -> None:
    """Called by the bootstrap."""
    agent = Agent(config)  # it lives on in every program: to take it apart would cost each of them half a millisecond
    job = agent.serve()
    if job is not None:
        try:
            job.become()
        except Exception as error:
            os.write(2, f"the program could not be started: {error!r}\n".encode())
        finally:
            os._exit(125)  # a program that ran never comes here
