"""A sandbox that is a hardened container with our agent as process 1."""

import asyncio
import json
import os
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

from evalpool.schemas.errors import CannotImport, SandboxKilled, SandboxLost, SetupError
from evalpool.schemas.settings import Settings
from evalpool.worker.sandbox import agent, cgroup
from evalpool.worker.sandbox.agent.wire import UNABLE, Given, Run, pack
from evalpool.worker.sandbox.agent.words import BEGUN, BORN, CHECKED, COLD, HOME, NOT_BORN, READY
from evalpool.worker.sandbox.base import Box, Command, End, Hear, Note, Outcome, Program, Running, Shape, Usage
from evalpool.worker.sandbox.engine import OWNER, Engine, owner
from evalpool.worker.sandbox.hardening import (
    memory_bytes,
    new_uid,
    options,
    process_count,
    socket_bytes,
    stack_bytes,
)
from evalpool.worker.sandbox.line import opened
from evalpool.worker.sandbox.replies import count, ending, seconds
from evalpool.worker.sandbox.session import Session
from evalpool.worker.sandbox.stream import Frame, Reply, Stream

START_SECONDS = 60.0
SLACK_SECONDS, GRACE_SECONDS = 0.5, 5.0
"""How long after the agent's own deadline the worker begins to look for a reason, and how much later it gives the
sandbox up."""
RESET_SECONDS = 10.0
ASIDE_SECONDS = 0.05
"""CPU time of the sandbox that is neither the program's nor the agent's: the reset begins before we read."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
ONE_CPU = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For a sandbox that has one CPU: else the libraries for linear algebra start as many threads as the machine has CPUs,
which would wait for each other; and no thread may be alive when a program is forked."""
BIRTH, BEGINNING, READINESS = (word.decode() for word in (BORN, BEGUN, BEGUN + READY))
NOTES = {
    "": (Note.SYNTAX,),
    BEGINNING: (Note.RAISED, Note.MEMORY),
    READINESS: (Note.RAISED, Note.MEMORY, Note.ASSERTION, Note.TAMPERED),
}
"""What the harness may note at each stage. The program can write into the same pipe, but it cannot take back what the
harness wrote before, so it can only claim a failure that it could really have had."""


async def limited(box: Box, shape: Shape, engine: Engine, group: cgroup.Cgroup | None, processes: int) -> bool:
    """Set the limits of a container and return whether they are verified. The worker sets them itself where it sees the
    container's cgroup; elsewhere it asks the engine, which takes as long as several jobs."""
    memory, done = memory_bytes(shape), True
    try:
        if group is not None:
            wanted = memory, socket_bytes(shape), processes
            done = await asyncio.to_thread(group.limit, *wanted) if group.exceeds(memory) else group.limit(*wanted)
        elif shape != box.shape:
            lower = memory < memory_bytes(box.shape)
            done = await engine.call(engine.update, box.id, memory, processes, lower)
    except (SandboxLost, OSError, ValueError):  # the container is gone, or uses too much
        return False
    if done:
        box.shape = shape
    return done


class DockerBox(Box):
    """A container whose agent is driven over the direct line or the attached stream: no exec, no mount, no copied
    file."""

    def __init__(self, shape: Shape, engine: Engine, *, settings: Settings, without: Collection[str] = ()) -> None:
        """`without` are the modules that cannot be imported in the image."""
        super().__init__(shape)
        self._engine, self._settings = engine, settings
        self._preload = [*agent.USUAL, *(name for name in settings.preload if name not in without)]
        self._imports = [name for name in shape.preload if name not in without]
        self._imported_bytes = 0
        """Memory that the modules take which are imported in advance for the programs of this kind."""
        self._stream = Stream()
        self._cgroup: cgroup.Cgroup | None = None
        self._request = 0
        self._clean: Reply | None = None
        """The agent's second reply to a run, which says whether the sandbox is as it was at birth."""
        self._kept: tuple[bytes, dict[str, bytes]] | None = None
        """The code and the files that the agent has kept of the last run."""
        self._session: Session | None = None
        self._closing = False

    @property
    def alive(self) -> bool:
        return self._stream.alive

    async def start(self) -> None:
        launch = self._engine.call(self._engine.launch, options(self.shape, {OWNER: owner()}, self._settings.runtime))
        self.id, pid, self.image_digest, sock = await launch
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: self._stream, sock=sock)
            hello = self._stream.expect(0)
            home, environment = self.shape.home, ENVIRONMENT | {"HOME": self.shape.home}
            if self.shape.cpus <= 1:
                environment |= ONE_CPU
            self._stream.send(agent.first_frame(new_uid(), home, environment, self._preload, self._imports))
            try:
                meta, _ = await self._stream.arrived(hello, START_SECONDS)
            except SandboxLost as error:
                _, unable, why = str(error).partition(UNABLE)
                if not unable:
                    raise
                module, _, reason = why.removesuffix(")").partition(" ")
                raise CannotImport(module, reason) from None
            if meta.get("hello") != agent.version():
                raise SandboxLost("the agent is not of this version of evalpool")
            if self.shape.preload:
                self._imported_bytes = count(meta, "imported_bytes")
            if meta.get("filter") is not True:
                raise SetupError("sandboxes need an x86-64 or arm64 processor: there is no syscall filter for this one")
            line = opened(pid, meta.get("line"))
            self._stream.send(pack({"direct": line is not None}))
            if line is not None:
                await self._stream.go_over(line)
            self._cgroup = cgroup.find(pid, self.id)
            if not await self.limit(self.shape):  # the engine could not limit the buffers of sockets
                raise SandboxLost("the limits of the new sandbox could not be set")
        except BaseException:
            await self.close()
            raise
        if self._cgroup is not None:  # else this pid may be that of another process here
            with suppress(OSError):  # if allowed: a thousand processes of a program must not keep the agent from acting
                os.setpriority(os.PRIO_PROCESS, pid, -20)

    async def limit(self, shape: Shape) -> bool:
        return await limited(self, shape, self._engine, self._cgroup, process_count(shape, self._settings.runtime))

    async def run(self, program: Program) -> Outcome:
        self._request += 1
        self.uses += 1
        limits, cold = program.limits, self._cold(program.env)
        argv = program.argv or ((COLD,) if cold else ())
        given = b""
        if argv or program.args or program.env or program.files:
            more = Given(argv=argv, args=program.args, env=program.env, files=[*program.files])
            given = json.dumps(more, ensure_ascii=False).encode()  # arguments may be large, and escapes are slow
        kept, self._kept = self._kept, (program.code, program.files) if program.more else None
        same = kept is not None and kept[0] is program.code and kept[1] is program.files
        own = (program.code, *program.files.values())
        parts = (given, program.stdin) if same else (*own, given, program.stdin)
        request: Run = {
            "id": self._request,
            "main": program.main,
            "executable": program.executable,
            "limits": limits.model_dump()
            | {"wall_seconds": limits.wall, "cpus": self.shape.cpus, "patience": program.patience}
            | {"stack_bytes": stack_bytes(self.shape)},
            "checked": program.check is not None,
            "tools": program.tools,
            "guarded": program.guarded,
            "subject": program.subject,
            "sizes": [len(part) for part in (*own, given, program.stdin)],
            "kept": sum(map(len, own)) if same else 0,
            "more": program.more,
        }
        frames, token = [pack(request, sum(map(len, parts))), *parts], ""
        if program.check is not None:
            # The check has a frame of its own, which the agent reads after the fork: no job is born with it in memory.
            token = secrets.token_hex(16)
            sealed = len(program.check).to_bytes(4, "big") + program.check + token.encode()
            frames += [pack({}, len(sealed)), sealed]
        try:
            before = self._cgroup.start() if self._cgroup else None
        except OSError as error:
            raise SandboxLost(f"the container is gone ({error})") from None
        started, reply = time.monotonic(), self._stream.expect(2 * limits.output_bytes)
        self._clean = self._stream.expect(0)
        self._stream.send(*frames)
        await asyncio.wait((reply,), timeout=limits.wall + program.patience + SLACK_SECONDS)
        try:
            meta, body = await self._late(reply, before)
            outcome = self._outcome(meta, body, limits.output_bytes, token)
        except SandboxLost as lost:
            outcome = await self._autopsy(lost, before, started)
        return outcome if before is None else self._corrected(outcome, before)

    def spawn(self, command: Command, hear: Hear) -> Running:
        if self._session is None:
            self._request += 1
            self._clean = self._kept = None
            self._session = Session(self._stream, self._request, self.shape)
        self.uses += 1
        return self._session.spawn(command, hear, cold=self._cold(command.env))

    def usage(self) -> Usage | None:
        with suppress(OSError):  # the container is gone
            return self._cgroup.usage() if self._cgroup is not None else None
        return None

    async def reset(self) -> bool:
        if self._session is not None:
            clean = await self._session.close()
            if not clean:
                self._stream.fail("the sandbox could not be reset")  # its agent may still be in that session
            self._session = None
            return clean
        if self._clean is None or not self.alive:
            return self.alive
        try:
            reply, _ = await self._stream.arrived(self._clean, RESET_SECONDS)
        except SandboxLost:
            return False
        return reply == {"id": self._request, "dirty": ""}

    async def close(self) -> None:
        self._stream.close()
        if self._cgroup is not None:
            self._cgroup.unthrottle()
            self._cgroup.close()
            self._cgroup = None
        if self.id and not self._closing:
            self._closing = True
            with suppress(SandboxLost):  # then the sweeper removes it
                await self._engine.call(self._engine.remove, self.id)

    def _cold(self, env: dict[str, str]) -> bool:
        return self._settings.interpreter == "cold" or any(name.startswith("PYTHON") for name in env)

    def _outcome(self, reply: dict[str, Any], body: bytes, cap: int, token: str) -> Outcome:
        """Return the outcome that a reply tells; raise `SandboxLost` if the reply is not possible."""
        try:
            stdout, stderr = count(reply, "stdout"), count(reply, "stderr")
            if reply["id"] != self._request or stdout + stderr != len(body) or max(stdout, stderr) > cap:
                raise ValueError("id or sizes")
            if reply["ended"] not in (End.ITSELF, End.CPU, End.WALL, End.OUTPUT):
                raise ValueError("ended")
            born, said = str(reply["said"]).startswith(BIRTH), str(reply["said"]).removeprefix(BIRTH)
            if not born and reply["ended"] == End.ITSELF and reply["exit_code"] == NOT_BORN:
                raise ValueError(f"the program was not started: {body[stdout:][:200]!r}")
            stage = next(stage for stage in reversed(NOTES) if said.startswith(stage))
            said = said.removeprefix(stage)
            note = Note.of(said)
            return Outcome(
                checked=bool(token) and said == CHECKED.decode() + token,
                note=note if note in NOTES[stage] else Note.NONE,
                stdout=body[:stdout],
                stderr=body[stdout:],
                delay_seconds=seconds(reply, "delay_seconds"),
                paused_seconds=seconds(reply, "paused_seconds"),
                agent_seconds=seconds(reply, "agent_seconds"),
                processes=count(reply, "processes"),
                **ending(reply),
            )
        except (KeyError, ValueError) as error:
            raise SandboxLost(f"the agent sent an impossible reply ({error})") from None

    async def _autopsy(self, lost: SandboxLost, before: cgroup.Reading | None, started: float) -> Outcome:
        """Find out why the sandbox died under a program. Death for memory is the program's doing, so its outcome is
        returned; any other loss is raised."""
        wall_seconds, notes = time.monotonic() - started, {"oom"}
        if before is None or not self._out_of_memory(before):
            notes = await self._engine.call(self._engine.ends, self.id, started)
        self._stream.close()
        if "oom" in notes:
            return Outcome.killed_for_memory(wall_seconds)
        if notes == {"die"}:  # nobody killed it from outside
            raise SandboxKilled("the sandbox ended by itself while the program ran") from lost
        raise lost

    async def _late(self, reply: Reply, before: cgroup.Reading | None) -> Frame:
        """Return a reply that should be there by now. An agent gets some more time to answer on a busy machine, unless
        it is stuck because the program has used up the sandbox's memory."""
        end = time.monotonic() + GRACE_SECONDS - SLACK_SECONDS
        while not reply.done() and time.monotonic() < end:
            if before is not None and self._out_of_memory(before):
                raise SandboxLost("the agent is stuck: the sandbox has no memory left")
            await asyncio.wait((reply,), timeout=SLACK_SECONDS)
        return await self._stream.arrived(reply, SLACK_SECONDS)

    def _out_of_memory(self, before: cgroup.Reading) -> bool:
        """Return whether the kernel has killed a process of the sandbox for memory since."""
        try:
            return self._cgroup is not None and self._cgroup.read().oom_kills > before.oom_kills
        except OSError:  # the container's last traces are gone already
            return False

    def _corrected(self, outcome: Outcome, before: cgroup.Reading) -> Outcome:
        """Return the outcome with the numbers of the host's kernel, which are the truth; the agent's are only finer."""
        if self._cgroup is None:
            raise SandboxLost("the sandbox was closed")
        try:
            after = self._cgroup.read()
        except OSError:  # the container has gone at this very moment, so the agent's last reply stands
            return outcome
        # What the agent says it used is not the program's, as far as the kernel has counted it for the agent's process.
        agent = max(0.0, min(outcome.agent_seconds, after.agent_seconds - before.agent_seconds))
        cpu = after.cpu_seconds - before.cpu_seconds - agent - ASIDE_SECONDS
        moved = after.peak_bytes > before.peak_bytes
        # What was imported for the program is part of what it uses, although it was in use before.
        used = after.peak_bytes - before.base_bytes + self._imported_bytes
        return replace(
            outcome,
            cpu_seconds=max(outcome.cpu_seconds, cpu),
            memory_bytes=max(outcome.memory_bytes, used if moved else 0),
            oom_kills=after.oom_kills - before.oom_kills,
        )
