"""A sandbox that is a hardened container with our agent as process 1."""

import asyncio
import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from schemas.errors import SandboxKilled, SandboxLost, SetupError
from schemas.settings import Settings
from worker.sandbox import agent, cgroup
from worker.sandbox.agent.wire import pack
from worker.sandbox.base import Command, Hear, Outcome, Program, Running, Sandbox, Shape, Usage
from worker.sandbox.engine import OWNER, Engine, owner
from worker.sandbox.hardening import options
from worker.sandbox.session import Session, count, seconds, told
from worker.sandbox.stream import Reply, Stream

START_SECONDS = 60.0
SLACK_SECONDS, GRACE_SECONDS = 0.5, 5.0
"""How much longer than the agent's own deadline the worker waits before it looks for a reason, and then before it gives
the sandbox up."""
RESET_SECONDS = 10.0
AGENT_CPU_SECONDS = 0.05
"""What the agent itself may use during a run: so much more CPU than it owns up to is not yet a lie."""
FIRST_UID, UIDS = 1 << 20, 1 << 30
"""Jobs run as a user of their sandbox's own: the kernel counts many limits by user, over all containers."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/box", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
COLD = ("python3",)
"""The command that stands for an interpreter of the program's own; one that is set up by variables needs it."""
NOT_BORN = 125
"""How a child of the agent ends that could not become the program. So may a program: but only one that was born."""
WORDS = ("syntax", "raised", "assertion", "memory", "tampered")


class DockerSandbox(Sandbox):
    """Driven over the attached stream: no exec, no mount, no copied file."""

    def __init__(self, shape: Shape, engine: Engine, *, settings: Settings) -> None:
        super().__init__(shape)
        self._engine, self._settings = engine, settings
        self._stream = Stream()
        self._cgroup: cgroup.Cgroup | None = None
        self._request = 0
        self._clean: Reply | None = None
        """The agent's second reply to a run: whether the sandbox is as at birth."""
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
            uid, preload = FIRST_UID + secrets.randbelow(UIDS), [*agent.USUAL, *self._settings.preload]
            self._stream.send(agent.first_frame({"uid": uid, "preload": preload, "env": environment, "home": home}))
            try:
                meta, _ = await self._stream.arrived(hello, START_SECONDS)
            except SandboxLost as error:
                if "ModuleNotFoundError" in str(error):
                    raise SetupError(f"EVALPOOL_PRELOAD: {error} in the image {self.shape.image}") from None
                raise
            if meta.get("hello") != agent.version():
                raise SandboxLost("the agent's greeting is not ours")
            if meta.get("filter") is not True:
                raise SetupError("there is no syscall filter for this processor: x86-64 and arm64 have one")
        except BaseException:
            await self.close()
            raise
        self._cgroup = cgroup.find(pid)
        with suppress(OSError):  # where we may: a thousand processes of a program must not keep the agent from acting
            os.setpriority(os.PRIO_PROCESS, pid, -20)

    async def run(self, program: Program) -> Outcome:
        self._request += 1
        self.uses += 1
        limits, cold = program.limits, self._cold(program.env)
        argv = program.argv or (COLD if cold else ())
        given = b""
        if argv or program.args or program.env or program.files:
            more = {"argv": argv, "args": program.args, "env": program.env, "files": [*program.files]}
            given = json.dumps(more).encode()
        parts = (given, program.code, program.stdin, *program.files.values())
        request: dict[str, Any] = {
            "id": self._request,
            "main": program.main,
            "limits": limits.model_dump()
            | {"wall_seconds": limits.wall, "cpus": self.shape.cpus, "patience": program.patience},
            "checked": program.check is not None,
            "tools": program.tools,
            "guarded": program.guarded,
            "subject": program.subject,
            "sizes": [len(part) for part in parts],
        }
        frames, token = [pack(request, sum(request["sizes"])), *parts], ""
        if program.check is not None:
            # In a frame of its own, which the agent reads after the fork: no job is born with it in memory.
            token = secrets.token_hex(16)
            sealed = len(program.check).to_bytes(4, "big") + program.check + token.encode()
            frames += [pack({}, len(sealed)), sealed]
        try:
            before = self._cgroup.start() if self._cgroup else None
        except OSError as error:
            raise SandboxLost(f"the container is gone ({error})") from None
        started, reply = time.monotonic(), self._stream.expect(2 * limits.output_bytes)
        self._clean = self._stream.expect(0)
        self._stream.send(b"".join(frames))
        await asyncio.wait((reply,), timeout=limits.wall + program.patience + SLACK_SECONDS)
        try:
            if not reply.done() and before is not None and self._out_of_memory(before):
                raise SandboxLost("the agent is stuck where there is no memory left")
            meta, body = await self._stream.arrived(reply, GRACE_SECONDS)
            outcome = self._outcome(meta, body, limits.output_bytes, token)
        except SandboxLost as lost:
            outcome = await self._autopsy(lost, before, time.monotonic() - started)
        return outcome if before is None else self._corrected(outcome, before)

    def spawn(self, command: Command, hear: Hear) -> Running:
        if self._session is None:
            self._request += 1
            self._clean = None
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
                self._stream.fail("its reset failed")  # its agent may still be in that session
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
        with suppress(RuntimeError):  # of another event loop, which is gone
            self._stream.close()
        if self._cgroup is not None:
            self._cgroup.unthrottle()
            self._cgroup.close()
            self._cgroup = None
        if self.id and not self._closing:
            self._closing = True
            with suppress(SandboxLost):  # then it is the sweeper's
                await self._engine.call(self._engine.remove, self.id)

    def _cold(self, env: dict[str, str]) -> bool:
        return self._settings.interpreter == "cold" or any(name.startswith("PYTHON") for name in env)

    def _outcome(self, reply: dict[str, Any], body: bytes, cap: int, token: str) -> Outcome:
        """The reply, believed only where it is possible."""
        try:
            stdout, stderr = count(reply, "stdout"), count(reply, "stderr")
            if reply["id"] != self._request or stdout + stderr != len(body) or max(stdout, stderr) > cap:
                raise ValueError("id or sizes")
            if reply["ended"] not in ("itself", "cpu", "wall", "output"):
                raise ValueError("ended")
            born, said = str(reply["said"]).startswith("born "), str(reply["said"]).removeprefix("born ")
            if not born and reply["ended"] == "itself" and reply["exit_code"] == NOT_BORN:
                raise ValueError(f"the program was not started: {body[stdout:][:200]!r}")
            said = said.removeprefix("ready ")
            return Outcome(
                checked=bool(token) and said == f"checked {token}",
                said=said if said in WORDS else "",
                stdout=body[:stdout],
                stderr=body[stdout:],
                delay_seconds=seconds(reply, "delay_seconds"),
                paused_seconds=seconds(reply, "paused_seconds"),
                processes=count(reply, "processes"),
                **told(reply),
            )
        except (KeyError, ValueError) as error:
            raise SandboxLost(f"the agent's reply is not possible ({error})") from None

    async def _autopsy(self, lost: SandboxLost, before: cgroup.Reading | None, wall_seconds: float) -> Outcome:
        """Why it died under a program. Of memory is the program's doing, and an outcome; else the loss is raised."""
        notes = {"oom"}
        if before is None or not self._out_of_memory(before):
            notes = await self._engine.call(self._engine.ends, self.id)
        self._stream.close()
        if "oom" in notes:
            return Outcome.killed_for_memory(wall_seconds)
        if notes == {"die"}:  # and nobody killed it from outside
            raise SandboxKilled("the sandbox ended by itself while the program ran") from lost
        raise lost

    def _out_of_memory(self, before: cgroup.Reading) -> bool:
        """Whether the kernel has ended something of the sandbox for memory since."""
        try:
            return self._cgroup is not None and self._cgroup.read().oom_kills > before.oom_kills
        except OSError:  # the container's last traces are gone already
            return False

    def _corrected(self, outcome: Outcome, before: cgroup.Reading) -> Outcome:
        """With the numbers that the host's kernel counted: they are the truth, the agent's are only finer."""
        if self._cgroup is None:
            raise SandboxLost("the sandbox was closed")
        try:
            after = self._cgroup.read()
        except OSError:  # the container is gone in this very moment; its last reply stands
            return outcome
        cpu = after.cpu_seconds - before.cpu_seconds - AGENT_CPU_SECONDS
        moved = after.peak_bytes > before.peak_bytes
        return replace(
            outcome,
            cpu_seconds=max(outcome.cpu_seconds, cpu),
            memory_bytes=max(outcome.memory_bytes, after.peak_bytes - before.base_bytes if moved else 0),
            oom_kills=after.oom_kills - before.oom_kills,
        )
