"""The contract of a sandbox, which the worker calls a box: what goes in, what comes out, and who is to blame."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from evalpool.schemas.limits import Limits
from evalpool.worker.sandbox.agent import words

SIGNALS = 64
"""How many signals there are."""


@dataclass(frozen=True)
class Shape:
    """What a run needs of its sandbox: the kind, which a sandbox is born with and cannot change, and the limits that
    are set when it is lent."""

    image: str
    """The image, written as `schemas.images` defines it."""
    memory_mib: int
    processes: int
    disk_mib: int
    extra_mib: int = 0
    """Memory that the agent itself needs to hold an unusually large job."""
    cpus: float = 1.0
    commands: int = 0
    """How many commands of a session may run at a time; a process of ours watches each."""
    home: str = words.HOME
    """The folder in which the commands of a session work; jobs work in `/box`."""
    preload: tuple[str, ...] = ()
    """Modules that the warm interpreter has imported, because the job imports them; an image may lack them."""

    @cached_property
    def kind(self) -> "Shape":
        """The shape without the limits that can be set on a living sandbox. Sandboxes of one kind are
        interchangeable."""
        return replace(self, memory_mib=0, processes=0, extra_mib=0)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One run: the program and everything that it is given."""

    code: bytes
    main: str
    """The file in the working directory that the code is put into."""
    argv: tuple[str, ...] = ()
    """The command that runs that file; empty for the warm Python interpreter."""
    executable: bool = False
    """Whether the file is itself a program for the machine."""
    args: tuple[str, ...] = ()
    stdin: bytes = b""
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    check: bytes | None = None
    """A test program that runs after the code, in the same interpreter."""
    tools: tuple[str, ...] = ()
    """The modules that the check imports; the check gets them as they were before the program ran."""
    guarded: bool = True
    """Whether those modules and the builtins must still be unchanged when the check ends."""
    subject: str | None = None
    """The function that the check is about. If known, the check sees no other global with the name of a builtin."""
    limits: Limits = field(default_factory=Limits)
    more: bool = False
    """Whether the same code and the same files are to be run again after this, so that a sandbox may keep them."""
    patience: float = 0.0
    """Seconds of waiting for a CPU, or of a pause, that do not count as wall time, at most."""


class End(StrEnum):
    """What ended a run. The values are the words that the agent sends."""

    ITSELF = "itself"
    CPU = "cpu"
    WALL = "wall"
    OUTPUT = "output"
    STOPPED = "stopped"
    """Its caller stopped it; only a command of a session can end so."""


class Note(StrEnum):
    """What the harness, our code around a Python program, noted about its failure. The values are the words that the
    harness writes."""

    NONE = ""
    SYNTAX = "syntax"
    RAISED = "raised"
    ASSERTION = "assertion"
    MEMORY = "memory"
    TAMPERED = "tampered"

    @classmethod
    def of(cls, word: str) -> "Note":
        """Return the note with this value; `NONE` for any other text, since a program can write to the same pipe."""
        try:
            return cls(word)
        except ValueError:
            return cls.NONE


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a program did, as it was measured; `worker.judge` makes a verdict of it."""

    ended: End
    exit_code: int | None
    signal: int | None
    checked: bool
    """Whether the check ran to its last line."""
    note: Note
    """A hint at how the program failed, never proof of success."""
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
    """How long the program was ready to run but had no CPU; known only if the wall limit ended it."""
    paused_seconds: float = 0.0
    """How long the whole sandbox was paused from outside, by `docker pause` or with its machine; known only if the wall
    limit ended the program."""
    agent_seconds: float = 0.0
    """CPU time that our own agent says it used meanwhile; it is not part of the program's."""

    @property
    def abnormal(self) -> bool:
        """Whether a limit or a signal ended the program."""
        return self.ended is not End.ITSELF or self.signal is not None or self.oom_kills > 0

    @classmethod
    def killed_for_memory(cls, wall_seconds: float) -> "Outcome":
        """Return the outcome of a program that was killed for memory together with its whole sandbox."""
        return cls(
            ended=End.ITSELF, exit_code=None, signal=9, checked=False, note=Note.NONE, stdout=b"", stderr=b"",
            stdout_total=0, stderr_total=0, wall_seconds=wall_seconds, cpu_seconds=0, memory_bytes=0, oom_kills=1,
            processes=1,
        )  # fmt: skip


def signal_of(status: int) -> int | None:
    """Return the signal that a shell, Docker or bubblewrap means by an exit status: 128 and the signal's number. A
    program that ends with such a status cannot be told apart."""
    return status - 128 if 128 < status <= 128 + SIGNALS else None


EXECUTE = ("sh", "-c", 'chmod +x "$1" && shift && exec "$@"', "sh")
"""Goes before the file of a program for the machine and its command, where files are written without modes."""
STDOUT, STDERR, SIDE = words.STDOUT, words.STDERR, words.SIDE
"""The streams of a command."""
Hear = Callable[[int, bytes], None]
"""Called with output as it comes: the stream, and the bytes."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a session."""

    argv: tuple[str, ...] = ()
    """The command line; empty to run `code` in the warm Python interpreter."""
    code: bytes = b""
    """A Python program."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """Files by path, relative to `cwd`. They are written before the command starts, and stay."""
    cwd: str = ""
    """The folder that the command runs in, relative to the sandbox's home."""
    side: bool = False
    """Whether the command gets descriptor 3, a channel beside its output."""
    wall_seconds: float = 30.0
    output_bytes: int = 16 << 20
    """The most that the command may write to each stream; it is stopped when it writes more."""


class Running(ABC):
    """A running command. Whatever it started ends with it."""

    def __init__(self) -> None:
        self.over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """How the command ended, as `ended` says: `itself`, `wall`, `output`, or `stopped`; `SandboxLost` if the
        sandbox was lost. The output has been heard by then, and is not in the outcome."""
        self.over.add_done_callback(lambda over: over.cancelled() or over.exception())

    @abstractmethod
    def feed(self, data: bytes, *, last: bool = False) -> None:
        """Give the command input; after the last, its standard input ends."""

    @abstractmethod
    def interrupt(self) -> None:
        """Interrupt the command, as Control-C does."""

    @abstractmethod
    def stop(self) -> None:
        """End the command at once."""


@dataclass(frozen=True)
class Usage:
    """What all processes of a sandbox use together at one moment."""

    cpu_seconds: float
    memory_bytes: int
    processes: int


class Box(ABC):
    """A sandbox: a place that runs one program at a time or, in a session, several commands side by side.

    A session begins with the first command and ends with the next reset; until then, files stay.

    Whatever a program does, the result is an `Outcome`. `SandboxLost` means that the sandbox itself failed: it must be
    closed, and the run says nothing about the program.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        """The shape that it was last lent with, or is to be born with."""
        self.id = ""
        self.image_digest = ""
        self.uses = 0
        """How many programs have run in this sandbox."""
        self.suspect = False
        """Whether something out of the ordinary happened, so that the sandbox must not be used again even if its reset
        succeeds."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the sandbox can be asked for a run, as far as is known."""

    @abstractmethod
    async def start(self) -> None:
        """Make the sandbox ready to run; a failed start leaves nothing behind."""

    @abstractmethod
    async def limit(self, shape: Shape) -> bool:
        """Set the limits of this shape, which must be of the sandbox's own kind, for the runs to come. Return False
        unless that is verified; such a sandbox must be closed."""

    @abstractmethod
    async def run(self, program: Program) -> Outcome:
        """Run one program under its limits, until its last process is dead."""

    @abstractmethod
    def spawn(self, command: Command, hear: Hear) -> Running:
        """Start a command of a session; `hear` is called with its output while it runs."""

    @abstractmethod
    def usage(self) -> Usage | None:
        """Return what the sandbox uses now, or None where that cannot be seen."""

    @abstractmethod
    async def reset(self) -> bool:
        """Make the sandbox as it was at birth; return False unless that is verified."""

    @abstractmethod
    async def close(self) -> None:
        """Destroy the sandbox and everything in it. May be called at any time, and twice."""
