"""Frames: how the agent and its worker talk. One frame is two lengths, a small JSON object, and raw bytes.

    4 bytes   length of the JSON part        4 bytes   length of the raw part
    JSON      {"id": 7, …}                   raw       e.g. standard output followed by standard error

The worker sends a `Config` once; then a `Run` for each job (and a second frame with its check, if it has one), or
`{"op": "open"}` for a session, in which it sends a `Start` for each command, and `feed`, `interrupt` and `stop`.
The agent answers the first with `hello`, in which it offers a direct line, and the worker says whether it takes that
(`direct`). The agent answers a job with its end, followed by `dirty`; and a session with `stream`, `fed`
and the end of each command, followed by `dirty` when it is closed.

Whatever belongs to a job travels in the raw part, and the agent keeps it only in buffers that are wiped: the next job
is forked from this very memory.
"""

import json
import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any, TypedDict

UNABLE = "cannot preload "
"""What the agent says before it exits, followed by the name of a module that it cannot import."""
HEAD = struct.Struct(">II")
"""The two lengths. The bootstrap, which runs before this text is there, reads them by itself."""
GULP = 1 << 16
"""Bytes that are read or written at a time, at most."""
RESERVE = (1 << 20) + GULP
"""Bytes that a `Reserve` has from the start: as much as most programs may write to one stream, and a last gulp."""


class Config(TypedDict):
    """What the agent of a new container is told first."""

    uid: int
    """The user that jobs run as."""
    home: str
    """The folder in which the commands of a session work."""
    env: dict[str, str]
    preload: list[str]
    """Modules that the warm interpreter imports for every program."""
    imports: list[str]
    """Modules that it imports because the programs of this sandbox do; what they take is part of a program's memory."""
    version: str
    """Of the agent; it is repeated in the greeting."""
    cold: str
    """What a cold interpreter runs."""


class Request(TypedDict):
    """What a job's program and a command of a session have in common."""

    id: int
    limits: dict[str, float]
    checked: bool
    """Whether a frame with a check follows."""
    tools: tuple[str, ...]
    guarded: bool
    subject: str | None
    sizes: list[int]
    """Bytes of each piece of the raw part: the code, each file, a `Given` as JSON or nothing, and the input."""


class Run(Request):
    """A job's program."""

    main: str
    executable: bool
    kept: int
    """Bytes of the code and the files, if they are those of the last run and are not sent again; else 0."""
    more: bool
    """Whether to keep the code and the files for the next run."""


class Start(Request):
    """A command of a session."""

    op: str
    cwd: str
    file: str
    """The path at which its code is put for the interpreter; empty for none."""
    side: bool


class Given(TypedDict):
    """What a program is given besides its code and its input; it belongs to the job, so it is in the raw part."""

    argv: tuple[str, ...] | list[str]
    args: tuple[str, ...] | list[str]
    env: dict[str, str]
    files: list[str]


class Buffer:
    """Bytes that are overwritten when they are no longer needed.

    More than a gulp is held in a mapping of its own, which the kernel gets back: the C library keeps much of what was
    once allocated in large pieces, and that would be part of the memory of the next job.
    """

    def __init__(self) -> None:
        self._data: bytearray | mmap.mmap = bytearray(GULP)
        self.size = 0

    def fill(self, fd: int, most: int) -> int:
        """Read a descriptor once, `most` bytes at most; return how many came."""
        most = min(most, GULP)
        self._grow(self.size + most, 2 * self.size)
        with memoryview(self._data) as view:
            count = os.readv(fd, [view[self.size : self.size + most]])
        self.size += count
        return count

    def fill_exactly(self, fd: int, size: int) -> bool:
        """Read `size` bytes more; return False if the stream ends before."""
        self._grow(self.size + size)
        while size:
            count = self.fill(fd, size)
            if not count:
                return False
            size -= count
        return True

    def view(self, start: int = 0, end: int | None = None) -> memoryview:
        """Return a view of the bytes, which must be released before the buffer grows."""
        return memoryview(self._data)[start : self.size if end is None else end]

    def clear(self, kept: int = 0) -> None:
        """Overwrite everything after the first `kept` bytes, and forget it."""
        self._wipe(kept)
        if isinstance(self._data, mmap.mmap):
            start = -(-kept // mmap.PAGESIZE) * mmap.PAGESIZE
            if not kept:
                self._data = bytearray(GULP)
            elif start < len(self._data):
                self._data.madvise(mmap.MADV_DONTNEED, start)
        self.size = kept

    def _grow(self, need: int, want: int = 0) -> None:
        if need > len(self._data):
            grown = _mapping(max(need, want))
            grown[: self.size] = memoryview(self._data)[: self.size]  # no copy in between that nobody would wipe
            self._wipe()
            self._data = grown

    def _wipe(self, start: int = 0) -> None:
        for place in range(start, self.size, GULP):
            end = min(place + GULP, self.size)
            self._data[place:end] = bytes(end - place)


class Reserve(Buffer):
    """A buffer that no program inherits, and that has its memory from the start.

    It is for the output of a program. If reading took more memory while the program uses up all there is, the kernel
    might kill the agent: it spares nobody while a dying program has not yet given its memory back.
    """

    def __init__(self) -> None:
        self._map = _mapping(RESERVE)
        self._map.madvise(mmap.MADV_DONTFORK)  # what is shared with a child is copied when it is written to
        self._map[:: mmap.PAGESIZE] = bytes(len(range(0, RESERVE, mmap.PAGESIZE)))
        self._data, self.size = self._map, 0

    def clear(self, kept: int = 0) -> None:
        self._wipe(kept)
        if len(self._map) > RESERVE:
            self._map.resize(RESERVE)
        self.size = kept

    def _grow(self, need: int, want: int = 0) -> None:
        if need > len(self._map):
            self._map.resize(max(need, want))


def _mapping(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def ended(how: str, status: int, report: bytes, stdout_total: int, stderr_total: int) -> dict[str, object]:
    """Return the part of a reply that says how a program or a command ended, given its status as `wait4` has it."""
    return {
        "ended": how,
        "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "said": report.decode("ascii", "replace"),
        "stdout_total": stdout_total,
        "stderr_total": stderr_total,
    }


def pack(meta: Mapping[str, object], body_size: int = 0) -> bytes:
    """Return the head and the JSON part of a frame; the raw part must follow."""
    text = json.dumps(meta, separators=(",", ":")).encode()
    return HEAD.pack(len(text), body_size) + text


def read_frame(fd: int, body: Buffer) -> Any:
    """Read the next frame of a blocking descriptor. Return its JSON part, or None at the end of the stream; the raw
    part is put into the buffer, after what is kept of the last one. All else of that is gone before the next fork."""
    head = _exactly(fd, HEAD.size)
    if not head:
        return None
    text_size, body_size = HEAD.unpack(head)
    text = _exactly(fd, text_size)
    if not text:
        return None
    meta = json.loads(text)
    body.clear(meta.get("kept", 0))
    return meta if body.fill_exactly(fd, body_size) else None


def _exactly(fd: int, size: int) -> bytes:
    """Read `size` bytes; return none if the stream ends before."""
    data = os.read(fd, size)
    while 0 < len(data) < size:
        part = os.read(fd, size - len(data))
        data = data + part if part else b""
    return data


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def put(path: str, data: memoryview, mode: int = 0o644) -> str:
    """Write a new file, which stays ours: no job can change it, and we can remove it. Return what went wrong, or
    nothing.

    The files that belong to a job are written otherwise, by the job's own process and user (`program.Job`).
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        return f"{path}: {error.strerror}"
    try:
        write_all(file, data)
    except OSError as error:
        return f"{path}: {error.strerror}"
    finally:
        os.close(file)
    return ""
