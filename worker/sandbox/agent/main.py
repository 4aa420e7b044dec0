"""The agent: process 1 of every sandbox.

Theory of operation. The container's command is a short bootstrap that reads this package from standard input, so
any image with a Python will do and nothing is mounted or copied. The agent then answers one request after another
on the attached stream: `run` forks a copy of itself, which drops to the job's user and becomes the program; the
agent feeds and reads it, stops it at its limits, kills whatever is left and replies; `reset` empties every
writable place and says whether the sandbox is as at birth. When the worker dies, the stream ends; so does the agent
and with it, as process 1, the whole container.

It is the container's root with three capabilities: to become the job's user, its group, and to kill. Jobs run as
another user without any, so they can neither signal nor trace it, nor read its memory or its descriptors. It keeps
nothing of a job: no expected output, no other job's data, and no secret is ever in the memory that is forked.
The worker trusts nothing of what it replies all the same.
"""

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable

from . import kernel, program, wire
from .reset import Reset
from .watch import Watch

Job = Callable[[], None]


class Agent:
    """One sandbox's worth of state: two descriptors, the job's user, and the counters."""

    def __init__(self) -> None:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # else a job could open /proc/1/fd and speak in our name
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 1 gets no signal from inside that it does not handle
        self.requests, self.replies = os.dup(0), os.dup(1)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        self.counters = kernel.Counters()

    def serve(self, config: dict[str, object], version: str) -> Job | None:
        """Answer requests until the stream ends. In a forked child it returns too: with the job to become."""
        self.uid = int(str(config["uid"]))
        for place in ("/box", "/tmp"):
            os.chmod(place, 0o1777)
        self.reset = Reset(self.uid)
        gc.collect()
        gc.freeze()  # what is here now is never traversed again, so a job's collections do not copy our pages
        self._reply({"hello": version, "python": sys.version.split()[0]})
        while request := wire.read_frame(self.requests):
            meta, body = request
            if meta["op"] == "run":
                job = self._run(meta, body)
                if job is not None:
                    return job
            elif meta["op"] == "reset":
                self._reply({"id": meta["id"], "dirty": self.reset.verify()})
        return None

    def _run(self, meta: dict[str, object], body: bytes) -> Job | None:
        code, check, stdin, files = _unpack(meta, body)
        limits: dict[str, float] = meta["limits"]  # type: ignore[assignment]
        main = os.open(f"{program.HOME}/{meta['main']}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        wire.write_all(main, code)
        os.close(main)
        pipes = [os.pipe() for _ in range(4)]
        memory, peak, kills = self.counters.memory_bytes(), self.counters.peak_bytes(), self.counters.oom_kills()
        cpu, own, started = self.counters.cpu_seconds(), time.process_time(), time.monotonic()
        pid = os.fork()
        if not pid:
            (stdin_r, _), (_, stdout_w), (_, stderr_w), (_, report_w) = pipes
            return lambda: _become(self.uid, meta, code, check, files, limits, (stdin_r, stdout_w, stderr_w, report_w))
        (stdin_r, stdin_w), (stdout_r, stdout_w), (stderr_r, stderr_w), (report_r, report_w) = pipes
        for fd in (stdin_r, stdout_w, stderr_w, report_w):
            os.close(fd)
        found = Watch(self.counters, self.requests, limits).run(pid, stdin_w, stdin, (stdout_r, stderr_r), report_r)
        wall = time.monotonic() - started
        counted = self.counters.cpu_seconds() - cpu - (time.process_time() - own)
        grown = self.counters.peak_bytes()
        status = found.status if found.status is not None else signal.SIGKILL
        stdout, stderr = bytes(found.kept[stdout_r]), bytes(found.kept[stderr_r])
        self._reply(
            {
                "id": meta["id"],
                "ended": found.ended,
                "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                "said": found.report.decode("ascii", "replace"),
                "wall_seconds": wall,
                "cpu_seconds": max(found.cpu, counted),
                # The cgroup's peak counts all processes together, but only if it moved; else the largest one decides.
                "memory_bytes": max(found.rss, grown - memory if grown > peak else 0),
                "oom_kills": self.counters.oom_kills() - kills,
                "processes": found.processes,
                "stdout": len(stdout),
                "stderr": len(stderr),
                "stdout_total": found.total[stdout_r],
                "stderr_total": found.total[stderr_r],
            },
            stdout + stderr,
        )
        return None

    def _reply(self, meta: dict[str, object], body: bytes = b"") -> None:
        wire.write_all(self.replies, wire.pack(meta, body))


def _unpack(meta: dict[str, object], body: bytes) -> tuple[bytes, bytes | None, bytes, list[tuple[str, bytes]]]:
    """The raw part of a request: code, check, standard input, then the files."""
    names: list[tuple[str, int]] = meta["parts"]  # type: ignore[assignment]
    parts, start = [], 0
    for name, size in names:
        parts.append((name, body[start : start + size]))
        start += size
    code, check, stdin = (content for _, content in parts[:3])
    return code, check if meta["token"] else None, stdin, parts[3:]


def _become(
    uid: int,
    meta: dict[str, object],
    code: bytes,
    check: bytes | None,
    files: list[tuple[str, bytes]],
    limits: dict[str, float],
    fds: tuple[int, int, int, int],
) -> None:
    """In the child: the program, to its end."""
    argv: list[str] = meta["argv"]  # type: ignore[assignment]
    args: list[str] = meta["args"]  # type: ignore[assignment]
    report = program.confine(uid, limits, *fds)
    program.set_environment(meta["env"])  # type: ignore[arg-type]
    program.write_files(files)
    if not argv:
        program.Python(code, check, str(meta["token"]), args, report).run()
    with contextlib.suppress(OSError):
        os.execvpe(argv[0], [*argv, *args], os.environ)
    os.write(2, f"{argv[0]}: not found in this image\n".encode())
    os._exit(127)


def main(config: dict[str, object], version: str) -> None:
    """Called by the bootstrap."""
    job = Agent().serve(config, version)
    if job is not None:
        try:
            job()
        finally:
            os._exit(125)  # only a child that could not even be confined comes here; the program never ran
