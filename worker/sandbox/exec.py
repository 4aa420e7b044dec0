"""The fallback for images without Python: no agent, so one container per run, driven from outside by `docker exec`.

The limits are the same and so are the verdicts, but they are enforced by the worker: CPU time is looked at from the
host's cgroup files every few milliseconds, so a program may overrun it by that much, and where those files cannot be
seen only the wall limit ends it. These files also show a pause by the engine, but no other kind of pause. No second
syscall filter is laid on top of Docker's. It costs a container per run and two execs, and says so once in the log. What
a program leaves behind dies with its container.
"""

import asyncio
import logging
import secrets
import shlex
import time
from contextlib import suppress
from signal import SIGKILL

from schemas.errors import SandboxLost, SetupError
from worker.sandbox import cgroup
from worker.sandbox.base import Command, Hear, Outcome, Program, Running, Sandbox, Shape, Usage
from worker.sandbox.docker import ENVIRONMENT, FIRST_UID, UIDS
from worker.sandbox.engine import OWNER, Engine, owner
from worker.sandbox.hardening import options
from worker.sandbox.stream import Demultiplexer

log = logging.getLogger("evalpool.sandbox")

LOOK_SECONDS, ASK_SECONDS = 0.01, 0.25
"""How often the counters are looked at; and the engine is asked whether the program has ended."""
SIGNALS = 64
"""An exit code of 128 and up to so many more is a signal, to Docker as to a shell: it cannot be told apart here."""
START_SECONDS = 30.0
WAIT = "chmod 1777 /box /tmp /dev/shm; echo ready; cat > /dev/null"
"""What process 1 does all its life: wait for the end of the stream that the worker holds."""
BEGIN = """ulimit -c 0; ulimit -n 256; ulimit -f {blocks}
if [ "$1" = bash ] && ! command -v bash > /dev/null; then shift; set -- sh "$@"; fi
exec "$@"
"""
"""What stands before the program: the limits of a process, and another shell where there is no bash."""


class ExecSandbox(Sandbox):
    """One run, then it is gone."""

    def __init__(self, shape: Shape, engine: Engine, runtime: str | None = None) -> None:
        super().__init__(shape)
        self._engine, self._runtime = engine, runtime
        self._uid = str(FIRST_UID + secrets.randbelow(UIDS))
        self._cgroup: cgroup.Cgroup | None = None
        self._stream: asyncio.Transport | None = None
        self._closed = False

    @property
    def alive(self) -> bool:
        return self._stream is not None and not self._stream.is_closing()

    async def start(self) -> None:
        body = options(self.shape, {OWNER: owner()}, self._runtime)
        body |= {"Entrypoint": ["sh", "-c", WAIT]}
        body["HostConfig"] |= {"CapAdd": [], "PidsLimit": self.shape.processes + 2}
        self.id, pid, self.image_digest, sock = await self._engine.call(self._engine.launch, body)
        try:
            loop = asyncio.get_running_loop()
            self._stream, ready = await loop.create_connection(Demultiplexer, sock=sock)
            end = loop.time() + START_SECONDS
            while not ready.total[1]:
                if ready.over.is_set() or loop.time() > end:
                    raise SandboxLost("the container did not come up")
                await asyncio.sleep(LOOK_SECONDS)
        except BaseException:
            await self.close()
            raise
        self._cgroup = cgroup.find(pid)

    async def run(self, program: Program) -> Outcome:
        self.uses += 1
        for path, content in {program.main: program.code, **program.files}.items():
            put = f"mkdir -p {shlex.quote(path.rpartition('/')[0] or '.')} && cat > {shlex.quote(path)}"
            written = await self._exec(["sh", "-c", put], {}, content, None)
            if written.exit_code != 0:
                return written  # the files do not fit, or contradict each other: the job's own fault
        argv = program.argv or ("python3", program.main)
        begin = BEGIN.format(blocks=program.limits.file_mib * 2048)
        return await self._exec(["sh", "-c", begin, "sh", *argv, *program.args], program.env, program.stdin, program)

    def spawn(self, command: Command, hear: Hear) -> Running:
        raise SetupError(f"the image {self.shape.image} has no Python, which a session needs")

    def usage(self) -> Usage | None:
        return self._cgroup.usage() if self._cgroup is not None else None

    async def reset(self) -> bool:
        return False

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.abort()
        if self._cgroup is not None:
            self._cgroup.close()
            self._cgroup = None
        if self.id and not self._closed:
            self._closed = True
            with suppress(SandboxLost):
                await self._engine.call(self._engine.remove, self.id)

    async def _exit_code(self, exec_id: str) -> int:
        """Known a moment after the streams have ended."""
        for _ in range(100):
            status = await self._engine.call(self._engine.exit_code, exec_id)
            if status is not None:
                return status
            await asyncio.sleep(0.02)
        raise SandboxLost("the process's exit code is not to be had")

    async def _exec(self, argv: list[str], env: dict[str, str], stdin: bytes, program: Program | None) -> Outcome:
        """One process in the container, to its end or to a limit; the limits are the program's, if it is one."""
        if not self.alive:
            raise SandboxLost("the container is gone")
        environment = [f"{name}={value}" for name, value in (ENVIRONMENT | env).items()]
        exec_id, sock = await self._engine.call(self._engine.begin, self.id, argv, environment, self._uid)
        limits = program.limits if program else Program(code=b"", main="").limits
        output = Demultiplexer(limits.output_bytes)
        before, started = self._cgroup.start() if self._cgroup else None, time.monotonic()
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: output, sock=sock)
        transport.write(stdin)
        transport.write_eof()
        ended, cpu, status, ask = "itself", 0.0, None, started + ASK_SECONDS
        looked, paused, patience = started, 0.0, program.patience if program else 0.0
        while not output.over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(output.over.wait(), LOOK_SECONDS)
            if time.monotonic() > ask:  # a child of the program may hold its streams open
                status, ask = await self._engine.call(self._engine.exit_code, exec_id), time.monotonic() + ASK_SECONDS
            cpu = self._cgroup.read().cpu_seconds - before.cpu_seconds if self._cgroup and before else 0.0
            now = time.monotonic()
            if self._cgroup and self._cgroup.frozen():
                paused += now - looked
            looked = now
            if output.exceeded:
                ended = "output"
            elif cpu >= limits.cpu_seconds:
                ended = "cpu"
            elif now - started - min(paused, patience) > limits.wall:
                ended = "wall"
            elif status is None:
                continue
            break
        wall = time.monotonic() - started
        transport.abort()
        after = self._cgroup.read() if self._cgroup else None
        if ended != "itself":
            status = 128 + SIGKILL
        elif status is None:
            status = await self._exit_code(exec_id)
        killed = 128 < status <= 128 + SIGNALS
        return Outcome(
            ended=ended,
            exit_code=None if killed else status,
            signal=status - 128 if killed else None,
            checked=False,
            said="",
            stdout=bytes(output.kept[1]),
            stderr=bytes(output.kept[2]),
            stdout_total=output.total[1],
            stderr_total=output.total[2],
            wall_seconds=wall,
            cpu_seconds=cpu,
            memory_bytes=max(0, after.peak_bytes - before.base_bytes) if after and before else 0,
            oom_kills=after.oom_kills - before.oom_kills if after and before else 0,
            processes=1,
            paused_seconds=paused,
        )
