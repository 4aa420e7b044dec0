"""The contract of a sandbox: what goes in, what comes out, and who is to blame."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.limits import Limits


@dataclass(frozen=True)
class Shape:
    """What a sandbox is born with and cannot change later. Sandboxes of one shape are interchangeable."""

    image: str
    """In the form of `schemas.images`."""
    memory_mib: int
    processes: int
    disk_mib: int
    extra_mib: int = 0
    """Room for what the agent itself must hold of an unusually large job."""
    cpus: float = 1.0
    commands: int = 0
    """Commands of a session at a time; each has a process of ours that watches it."""
    home: str = "/box"
    """Where commands of a session work; jobs work in `/box`."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One run: the program and everything it is given."""

    code: bytes
    main: str
    """The file the code is put in, in the working directory."""
    argv: tuple[str, ...] = ()
    """The command that runs that file; empty: the warm Python interpreter."""
    args: tuple[str, ...] = ()
    stdin: bytes = b""
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    check: bytes | None = None
    """Run after the code in the same interpreter."""
    tools: tuple[str, ...] = ()
    """Modules that the check imports: it gets them as they were before the program."""
    guarded: bool = True
    """They, and the builtins, must still be so at its end."""
    subject: str | None = None
    """What the check is about: where it is known, no other global by the name of a builtin is seen by the check."""
    limits: Limits = field(default_factory=Limits)
    patience: float = 0.0
    """At most so many seconds of waiting for a CPU, or of a pause, do not count as wall time."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a program did, raw. Judging it is somebody else's work."""

    ended: str
    """`itself`, or the limit at which it was stopped: `cpu`, `wall`, `output`."""
    exit_code: int | None
    signal: int | None
    checked: bool
    """The check ran to its last line."""
    said: str
    """What the interpreter noted on the way: `syntax`, `raised`, `assertion`, `memory`, `tampered`, or nothing. A hint
    at how it failed, never proof of success."""
    stdout: bytes
    stderr: bytes
    stdout_total: int
    stderr_total: int
    wall_seconds: float
    cpu_seconds: float
    memory_bytes: int
    oom_kills: int
    processes: int
    delay_seconds: float = 0.0
    """How long it was ready to run and had no CPU; known where the wall limit ended it."""
    paused_seconds: float = 0.0
    """How long the whole sandbox was paused from outside, by `docker pause` or with its machine; known where the wall
    limit ended it."""

    @property
    def abnormal(self) -> bool:
        """Whether it ended otherwise than by itself: at a limit, or by a signal."""
        return self.ended != "itself" or self.signal is not None or self.oom_kills > 0

    @classmethod
    def killed_for_memory(cls, wall_seconds: float) -> "Outcome":
        """A program that took its whole sandbox along."""
        return cls(
            ended="itself", exit_code=None, signal=9, checked=False, said="", stdout=b"", stderr=b"",
            stdout_total=0, stderr_total=0, wall_seconds=wall_seconds, cpu_seconds=0, memory_bytes=0, oom_kills=1,
            processes=1,
        )  # fmt: skip


STDOUT, STDERR, SIDE = 1, 2, 3
"""The streams of a command."""
Hear = Callable[[int, bytes], None]
"""Told of output as it comes: of which stream, and what."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a session."""

    argv: tuple[str, ...] = ()
    """Empty: `code`, in the warm Python interpreter."""
    code: bytes = b""
    """A Python program."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """Written before it starts, and left there; relative to the folder it runs in."""
    cwd: str = ""
    """The folder it runs in, relative to the sandbox's home."""
    side: bool = False
    """It gets descriptor 3 to say something on that is not output."""
    wall_seconds: float = 30.0
    output_bytes: int = 16 << 20
    """Of each stream: the command is stopped where it writes more."""


class Running(ABC):
    """A command under way. Whatever it started ends with it."""

    def __init__(self) -> None:
        self.over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """How it ended, as `ended` says: `itself`, `wall`, `output`, or `stopped`. `SandboxLost`, if the sandbox did.
        Its output has been heard by then, and is not in here."""
        self.over.add_done_callback(lambda over: over.cancelled() or over.exception())

    @abstractmethod
    def feed(self, data: bytes, *, last: bool = False) -> None:
        """Input for it; after the last, its standard input ends."""

    @abstractmethod
    def interrupt(self) -> None:
        """As Control-C would."""

    @abstractmethod
    def stop(self) -> None:
        """End it at once."""


@dataclass(frozen=True)
class Usage:
    """What a sandbox uses at one moment, all its processes together."""

    cpu_seconds: float
    memory_bytes: int
    processes: int


class Sandbox(ABC):
    """One place to run programs in, one at a time; or, in a session, several commands side by side.

    A session begins with the first command and ends with the next reset: until then, files stay.

    What a program does is an `Outcome`, whatever it is. `SandboxLost` means that the sandbox itself failed: it must be
    closed, and the run says nothing about the program.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.id = ""
        self.image_digest = ""
        self.uses = 0
        """Programs run so far."""
        self.suspect = False
        """Something out of the ordinary happened in it: it is not to be used again, whatever its reset says."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it is worth asking for a run."""

    @abstractmethod
    async def start(self) -> None:
        """Make it ready to run; nothing is left behind when it fails."""

    @abstractmethod
    async def run(self, program: Program) -> Outcome:
        """Run one program under its limits, to the death of its last process."""

    @abstractmethod
    def spawn(self, command: Command, hear: Hear) -> Running:
        """Start a command; its output is heard while it runs."""

    @abstractmethod
    def usage(self) -> Usage | None:
        """What it uses now, where that can be seen."""

    @abstractmethod
    async def reset(self) -> bool:
        """Make it as at birth; False when it cannot be shown to be."""

    @abstractmethod
    async def close(self) -> None:
        """Destroy it and all it holds. May be called at any time, and twice."""
