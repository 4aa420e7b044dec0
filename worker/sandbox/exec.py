"""The fallback for images without Python: no agent, so one container per run, driven from outside by `docker exec`.

The limits and the verdicts are the same, but the worker enforces them. It reads the CPU time from the host's cgroup
files every few milliseconds, so a program may overrun its limit by that much; where those files cannot be seen, only
the wall limit ends the program. The files also show a pause by the engine, but no other kind of pause. There is no
second syscall filter on top of Docker's. A run costs a container and at least two execs, and the log says so once.
Whatever a program leaves behind dies with its container.
"""

import asyncio
import logging
import shlex
import time
from contextlib import suppress
from signal import SIGKILL

from evalpool.schemas.errors import SandboxLost, SetupError
from evalpool.worker.sandbox import cgroup
from evalpool.worker.sandbox.base import (
    EXECUTE,
    Box,
    Command,
    End,
    Hear,
    Note,
    Outcome,
    Program,
    Running,
    Shape,
    Usage,
    signal_of,
)
from evalpool.worker.sandbox.docker import ENVIRONMENT, limited
from evalpool.worker.sandbox.engine import OWNER, Engine, owner
from evalpool.worker.sandbox.hardening import new_uid, options, stack_bytes
from evalpool.worker.sandbox.stream import Demultiplexer

log = logging.getLogger("evalpool.sandbox")

LOOK_SECONDS, ASK_SECONDS = 0.01, 0.25
"""How often the counters are read, and how often the engine is asked whether the program has ended."""
START_SECONDS = 30.0
WAIT = "chmod 1777 /box /tmp /dev/shm; echo ready; cat > /dev/null"
"""The command of process 1: it waits for the end of the stream that the worker holds."""
BEGIN = """ulimit -c 0; ulimit -n 256; ulimit -f {blocks}; ulimit -s {stack}
if [ "$1" = bash ] && ! command -v bash > /dev/null; then shift; set -- sh "$@"; fi
exec "$@"
"""
"""Runs before the program: sets the per-process limits, and uses `sh` if the image has no bash."""


class ExecBox(Box):
    """A container for one run, without an agent."""

    def __init__(self, shape: Shape, engine: Engine, runtime: str | None = None) -> None:
        super().__init__(shape)
        self._engine, self._runtime = engine, runtime
        self._uid = str(new_uid())
        self._cgroup: cgroup.Cgroup | None = None
        self._stream: asyncio.Transport | None = None
        self._closed = False

    @property
    def alive(self) -> bool:
        return self._stream is not None and not self._stream.is_closing()

    async def start(self) -> None:
        body = options(self.shape, {OWNER: owner()}, self._runtime)
        body |= {"Entrypoint": ["sh", "-c", WAIT]}
        body["HostConfig"] |= {"CapAdd": [], "PidsLimit": self._processes(self.shape)}
        self.id, pid, self.image_digest, sock = await self._engine.call(self._engine.launch, body)
        try:
            loop = asyncio.get_running_loop()
            self._stream, ready = await loop.create_connection(Demultiplexer, sock=sock)
            end = loop.time() + START_SECONDS
            while not ready.total[1]:
                if ready.over.is_set() or loop.time() > end:
                    raise SandboxLost("the container did not start")
                await asyncio.sleep(LOOK_SECONDS)
            self._cgroup = cgroup.find(pid, self.id)
            if not await self.limit(self.shape):
                raise SandboxLost("the limits of the new container could not be set")
        except BaseException:
            await self.close()
            raise

    async def limit(self, shape: Shape) -> bool:
        return await limited(self, shape, self._engine, self._cgroup, self._processes(shape))

    async def run(self, program: Program) -> Outcome:
        self.uses += 1
        for path, content in {program.main: program.code, **program.files}.items():
            put = f"mkdir -p {shlex.quote(path.rpartition('/')[0] or '.')} && cat > {shlex.quote(path)}"
            written = await self._exec(["sh", "-c", put], {}, content, None)
            if written.exit_code != 0:
                return written  # the files do not fit, or contradict each other, which is the job's own fault
        argv = program.argv or ("python3", program.main)
        if program.executable:
            argv = (*EXECUTE, program.main, *argv)
        begin = BEGIN.format(blocks=program.limits.file_mib * 2048, stack=stack_bytes(self.shape) >> 10)
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

    @staticmethod
    def _processes(shape: Shape) -> int:
        """How many processes the container may have: process 1 waits, and a shell starts the program."""
        return shape.processes + 2

    async def _exited(self, exec_id: str) -> int:
        """Wait until a process has ended, also if a child of it holds its streams open."""
        while True:
            await asyncio.sleep(ASK_SECONDS)
            status = await self._engine.call(self._engine.exit_code, exec_id)
            if status is not None:
                return status

    async def _exit_code(self, exec_id: str) -> int:
        """Return the exit code of a process, which the engine knows a moment after its streams have ended."""
        for _ in range(100):
            status = await self._engine.call(self._engine.exit_code, exec_id)
            if status is not None:
                return status
            await asyncio.sleep(0.02)
        raise SandboxLost("Docker does not report the exit code of the process")

    async def _exec(self, argv: list[str], env: dict[str, str], stdin: bytes, program: Program | None) -> Outcome:
        """Run one process in the container until it ends or reaches a limit. With `program`, the limits are the
        program's."""
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
        ended, cpu = End.ITSELF, 0.0
        looked, paused, patience = started, 0.0, program.patience if program else 0.0
        # The engine may answer late, and the counters must be read meanwhile.
        exited = asyncio.create_task(self._exited(exec_id))
        try:
            while not output.over.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(output.over.wait(), LOOK_SECONDS)
                cpu = self._cgroup.read().cpu_seconds - before.cpu_seconds if self._cgroup and before else 0.0
                now = time.monotonic()
                if self._cgroup and self._cgroup.frozen():
                    paused += now - looked
                looked = now
                if output.exceeded:
                    ended = End.OUTPUT
                elif cpu >= limits.cpu_seconds:
                    ended = End.CPU
                elif now - started - min(paused, patience) > limits.wall:
                    ended = End.WALL
                elif not exited.done():
                    continue
                break
        finally:
            transport.abort()
            exited.cancel()
        status = exited.result() if exited.done() else None
        wall = time.monotonic() - started
        after = self._cgroup.read() if self._cgroup else None
        if ended is not End.ITSELF:
            status = 128 + SIGKILL
        elif status is None:
            status = await self._exit_code(exec_id)
        killer = signal_of(status)
        return Outcome(
            ended=ended,
            exit_code=None if killer else status,
            signal=killer,
            checked=False,
            note=Note.NONE,
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
