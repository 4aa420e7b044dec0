"""A sandbox that is a hardened container with our agent as process 1."""

import asyncio
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from schemas.errors import SandboxLost
from worker.sandbox import agent
from worker.sandbox.base import Outcome, Program, Sandbox, Shape
from worker.sandbox.engine import OWNER, Engine, owner
from worker.sandbox.hardening import options
from worker.sandbox.stream import Stream

START_SECONDS = 60.0
GRACE_SECONDS = 5.0
"""How much longer than the agent's own deadline the worker waits before it gives the sandbox up."""
RESET_SECONDS = 10.0
FIRST_UID, UIDS = 1 << 20, 1 << 30
"""Jobs run as a user of their sandbox's own: the kernel counts many limits by user, over all containers."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/box", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


class DockerSandbox(Sandbox):
    """Driven over the attached stream: no exec, no mount, no copied file."""

    def __init__(self, shape: Shape, engine: Engine) -> None:
        super().__init__(shape)
        self._engine = engine
        self._stream = Stream()
        self._request = 0
        self._peak: Path | None = None
        self._closing = False

    @property
    def alive(self) -> bool:
        return self._stream.alive

    async def start(self) -> None:
        launch = self._engine.call(self._engine.launch, options(self.shape, {OWNER: owner()}))
        self.id, pid, self.image_digest, sock = await launch
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: self._stream, sock=sock)
            hello = self._stream.expect(0)
            self._stream.send(agent.first_frame({"uid": FIRST_UID + secrets.randbelow(UIDS)}))
            meta, _ = await self._stream.arrived(hello, START_SECONDS)
            if meta.get("hello") != agent.version():
                raise SandboxLost("the agent's greeting is not ours")
        except BaseException:
            await self.close()
            raise
        self._peak = _peak_file(pid)

    async def run(self, program: Program) -> Outcome:
        self._request += 1
        self.uses += 1
        token = secrets.token_hex(16) if program.check is not None else ""
        parts = [
            ("code", program.code),
            ("check", program.check or b""),
            ("stdin", program.stdin),
            *program.files.items(),
        ]
        meta: dict[str, Any] = {
            "id": self._request,
            "op": "run",
            "main": program.main,
            "argv": program.argv,
            "args": program.args,
            "env": ENVIRONMENT | program.env,
            "limits": program.limits.model_dump() | {"wall_seconds": program.limits.wall, "cpus": 1},
            "token": token,
            "parts": [(name, len(content)) for name, content in parts],
        }
        self._forget_peak()
        reply, body = await self._stream.request(
            meta,
            b"".join(content for _, content in parts),
            reply_bytes=2 * program.limits.output_bytes,
            seconds=program.limits.wall + GRACE_SECONDS,
        )
        return self._outcome(reply, body, program, token)

    async def reset(self) -> bool:
        self._request += 1
        try:
            reply, _ = await self._stream.request({"id": self._request, "op": "reset"}, b"", 0, RESET_SECONDS)
        except SandboxLost:
            return False
        return reply == {"id": self._request, "dirty": ""}

    async def close(self) -> None:
        self._stream.close()
        if self.id and not self._closing:
            self._closing = True
            with suppress(SandboxLost):  # then it is the sweeper's
                await self._engine.call(self._engine.remove, self.id)

    def _outcome(self, reply: dict[str, Any], body: bytes, program: Program, token: str) -> Outcome:
        """The reply, believed only where it is possible."""
        try:
            stdout, stderr = _count(reply, "stdout"), _count(reply, "stderr")
            cap = program.limits.output_bytes
            if reply["id"] != self._request or stdout + stderr != len(body) or max(stdout, stderr) > cap:
                raise ValueError("id or sizes")
            if reply["ended"] not in ("itself", "cpu", "wall", "output"):
                raise ValueError("ended")
            said = str(reply["said"])
            return Outcome(
                ended=reply["ended"],
                exit_code=_small(reply, "exit_code"),
                signal=_small(reply, "signal"),
                checked=bool(token) and said == f"checked {token}",
                said=said if said in ("syntax", "raised", "assertion", "memory") else "",
                stdout=body[:stdout],
                stderr=body[stdout:],
                stdout_total=_count(reply, "stdout_total"),
                stderr_total=_count(reply, "stderr_total"),
                wall_seconds=_seconds(reply, "wall_seconds"),
                cpu_seconds=_seconds(reply, "cpu_seconds"),
                memory_bytes=_count(reply, "memory_bytes"),
                oom_kills=_count(reply, "oom_kills"),
                processes=_count(reply, "processes"),
            )
        except (KeyError, ValueError) as error:
            raise SandboxLost(f"the agent's reply is not possible ({error})") from None

    def _forget_peak(self) -> None:
        """Let the kernel count the peak of memory anew, where this worker may say so."""
        if self._peak is not None:
            with suppress(OSError):
                self._peak.write_text("0")


def _peak_file(pid: int) -> Path | None:
    """Where the peak of a process's cgroup is set back from outside (cgroup version 1)."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            file = Path(f"/sys/fs/cgroup/memory{path}/memory.max_usage_in_bytes")
            if "memory" in controllers.split(",") and file.exists():
                return file
    return None


def _count(reply: dict[str, Any], name: str) -> int:
    value = reply[name]
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(name)
    return value


def _small(reply: dict[str, Any], name: str) -> int | None:
    return None if reply[name] is None else _count(reply, name) & 0xFF


def _seconds(reply: dict[str, Any], name: str) -> float:
    value = reply[name]
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise ValueError(name)
    return float(value)
