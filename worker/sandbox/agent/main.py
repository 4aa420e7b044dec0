"""The agent: process 1 of every sandbox.

Theory of operation. The container's command is a short bootstrap that reads this package from standard input, so
any image with a Python will do and nothing is mounted or copied. The agent then answers one request after another
on the attached stream, or on two pipes of its own if the worker can open them (worker/sandbox/line.py): it forks a
copy of itself, which becomes the job's user and then the program; the agent feeds and reads it, stops it at its limits,
kills whatever is left and replies; then the agent empties every writable place and says in a second reply whether the
sandbox is as it was at birth. Instead of a job, the worker may ask for a session, in which files stay and commands run
side by side (session.py); the second reply then comes at its end. When the worker dies, the stream ends; so does the
agent and with it, as process 1, the whole container.

The agent is the container's root with three capabilities: to become the job's user, its group, and to kill. Jobs run
as another user without any, so they can neither signal nor trace the agent, nor read its memory or its descriptors.
What a program must not see of its check (the text and the token) comes in a second frame, which is read only after the
fork. Whatever the agent holds of a job lies in buffers that are wiped before the next one is forked from the same
memory. All the same, the worker trusts nothing that the agent replies.
"""

import fcntl
import gc
import importlib
import os
import signal
import sys

from . import interpreter, kernel, snapshot, wire
from .filter import install
from .program import SEALED, Job, find_generators, seed
from .reset import Reset
from .session import Session
from .watch import Watch
from .words import HOME, NOT_BORN, OPEN


class Agent:
    """The state of one sandbox: two descriptors, the job's user, the counters, and buffers that are wiped."""

    def __init__(self, config: wire.Config) -> None:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # else a job could open /proc/1/fd and speak in our name
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 1 gets no signal from inside that it does not handle
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("0")  # a job may lower its own score, but not below ours, if we are allowed to set it
        except OSError:
            pass
        for name in [name for name in sys.modules if name.partition(".")[0] == "evalpool_agent"]:
            del sys.modules[name]  # no program must find us there
        self.requests, self.replies, last_words = (
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, SEALED + 1) for fd in (0, 1, 2)
        )
        self.last_words = sys.stderr = os.fdopen(last_words, "w")  # for our own tracebacks; no job inherits it
        self.uid, self.cold_source = config["uid"], config["cold"]
        os.environ.clear()
        os.environ.update(config["env"])
        self.world = self.make_world()
        kernel.fence()
        known = install()
        self.counters, self.reset = kernel.Counters(), Reset(self.uid, config["home"])
        self.body, self.sealed, self.report = (wire.Buffer() for _ in range(3))
        self.stdout, self.stderr = wire.Reserve(), wire.Reserve()
        self.warm(config["preload"])
        before = kernel.own_bytes()
        self.warm(config["imports"])
        imported_bytes = max(0, kernel.own_bytes() - before)
        line = self.make_line()
        greeting = {"hello": config["version"], "python": sys.version.split()[0], "filter": known}
        self.reply({**greeting, "imported_bytes": imported_bytes, "line": [(fd, _name(fd)) for fd in line]})
        answer = wire.read_frame(self.requests, self.body)
        if answer is None:
            os._exit(0)
        if answer["direct"]:
            self.replies, self.requests = line
        else:
            for fd in line:
                os.close(fd)

    def make_world(self) -> interpreter.World:
        """Return the streams of a program, made over pipes as it will have; then nothing is left at their
        descriptors."""
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

    def make_line(self) -> tuple[int, int]:
        """Return our ends of two pipes, for replies and for requests. A worker on the same machine opens the other ends
        through /proc: no job can, since it may not look into /proc/1/fd, and the pipes are root's."""
        (requests, requests_w), (replies_r, replies) = os.pipe(), os.pipe()
        os.close(requests_w)
        os.close(replies_r)
        return replies, requests

    def warm(self, modules: list[str]) -> None:
        """Import modules that jobs will want, and keep the garbage collector from touching them, so that a job's copy
        of their memory stays shared. Exits if one of them cannot be imported; or starts a thread, which might hold a
        lock at a fork, and then no copy could ever take that lock; or writes files, which every job would find, and
        which no reset could remove."""
        for name in modules:
            try:
                snapshot.remember(name, importlib.import_module(name))
                if len(os.listdir("/proc/self/task")) > 1:
                    raise ImportError("it starts threads")
                if self.reset.remains():
                    raise ImportError("it writes files")
            except Exception as error:  # the traceback may be longer than what the worker reads; its root says why
                while root := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
                    error = root  # type: ignore[assignment]
                sys.exit(f"{wire.UNABLE}{name} ({type(error).__name__}: {' '.join(str(error).split())[:120]})")
        gc.collect()
        find_generators()
        gc.freeze()

    def serve(self) -> Job | None:
        """Answer requests until the stream ends. In a forked child, return the job to become."""
        while meta := wire.read_frame(self.requests, self.body):
            if meta.get("op") == OPEN:
                job = Session(self.requests, self.replies, self.body, self.counters, self.become).serve()
            else:
                job = self.run(meta)
            if job is not None:
                return job
            self.reply({"id": meta["id"], "dirty": self.reset.verify()})
        return None

    def run(self, meta: wire.Run) -> Job | None:
        """Run one program and reply; in the forked child, return the job to become."""
        sizes = meta["sizes"]
        stdin_start = sum(sizes[:-1])
        path = f"{HOME}/{meta['main']}"
        problem = wire.put(path, self.body.view(0, sizes[0]), 0o755 if meta["executable"] else 0o644)
        (stdin_r, stdin_w), (stdout_r, stdout_w), (stderr_r, stderr_w), (report_r, report_w), (sealed_r, sealed_w) = (
            os.pipe() for _ in range(5)
        )
        watch = Watch(self.counters, self.requests, meta["limits"])
        seed()
        pid = os.fork()
        if not pid:
            fds = stdin_r, stdout_w, stderr_w, report_w, sealed_r
            return self.become(meta, fds, problem)
        for fd in (stdin_r, stdout_w, stderr_w, report_w, sealed_r):
            os.close(fd)
        if meta["checked"] and wire.read_frame(self.requests, self.sealed) is None:
            os._exit(0)
        feeds = {stdin_w: self.body.view(stdin_start)}
        streams = {stdout_r: self.stdout, stderr_r: self.stderr, report_r: self.report}
        watch.run(pid, feeds, streams, report_r, {sealed_w: self.sealed.view()})
        self.reply(
            {
                "id": meta["id"],
                **wire.ended(
                    watch.ended,
                    watch.status,
                    bytes(self.report.view()),
                    watch.total[stdout_r],
                    watch.total[stderr_r],
                ),
                **watch.numbers(),
                "stdout": self.stdout.size,
                "stderr": self.stderr.size,
            },
            self.stdout,
            self.stderr,
        )
        self.body.clear(sum(sizes[:-2]) if meta["more"] else 0)
        for buffer in (self.sealed, self.stdout, self.stderr, self.report):
            buffer.clear()
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass  # there was no room for it
        return None

    def become(self, meta: "wire.Run | wire.Start", fds: tuple[int, ...], problem: str) -> Job:
        """Return the job that a forked child is to become."""
        return Job(self.uid, self.world, self.cold_source, meta, fds, self.body.view(), problem)

    def reply(self, meta: dict[str, object], *parts: wire.Buffer) -> None:
        """Send one frame."""
        wire.write_all(self.replies, wire.pack(meta, sum(part.size for part in parts)))
        for part in parts:
            wire.write_all(self.replies, part.view())


def _name(fd: int) -> str:
    """Return the name of an open file, which for a pipe has a number that is its own on the whole machine."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def main(config: wire.Config) -> None:
    """Run the agent; the bootstrap calls this."""
    try:
        agent = Agent(config)  # it lives on in every program: taking it apart would cost half a millisecond each time
        job = agent.serve()
    except BrokenPipeError:  # we, or a keeper, had something to tell the worker, but it is gone: so are we
        os._exit(0)
    if job is not None:
        try:
            job.become()
        except Exception as error:
            os.write(2, f"the program could not be started: {error!r}\n".encode())
        finally:
            os._exit(NOT_BORN)  # a program that was started never comes here
