"""Frames: how the agent and its worker talk. One frame is two lengths, a small JSON object, and raw bytes.

    4 bytes   length of the JSON part        4 bytes   length of the raw part
    JSON      {"id": 7, …}                   raw       e.g. standard output followed by standard error

What belongs to a job travels in the raw part, and the agent keeps it only in buffers that are wiped: the next job is
forked from this very memory.
"""

import json
import os
import struct

HEAD = struct.Struct(">II")
GULP = 1 << 16


class Buffer:
    """Bytes that are overwritten when they are no longer needed."""

    def __init__(self) -> None:
        self._data = bytearray(GULP)
        self.size = 0

    def fill(self, fd: int, most: int) -> int:
        """One read of a descriptor, of so many bytes at most; how many came."""
        most = min(most, GULP)
        self._grow(self.size + most, 2 * self.size)
        with memoryview(self._data) as view:
            count = os.readv(fd, [view[self.size : self.size + most]])
        self.size += count
        return count

    def fill_exactly(self, fd: int, size: int) -> bool:
        """So many bytes more; False when the stream ends before."""
        self._grow(self.size + size)
        while size:
            count = self.fill(fd, size)
            if not count:
                return False
            size -= count
        return True

    def view(self, start: int = 0, end: int | None = None) -> memoryview:
        """What is there; release it before the next change."""
        return memoryview(self._data)[start : self.size if end is None else end]

    def clear(self) -> None:
        """Forget everything."""
        self._wipe()
        if len(self._data) > GULP:
            self._data = bytearray(GULP)
        self.size = 0

    def _grow(self, need: int, want: int = 0) -> None:
        if need > len(self._data):
            grown = bytearray(max(need, want))
            grown[: self.size] = memoryview(self._data)[: self.size]  # no copy in between that nobody would wipe
            self._wipe()
            self._data = grown

    def _wipe(self) -> None:
        self._data[: self.size] = bytes(self.size)


def pack(meta: dict[str, object], body_size: int = 0) -> bytes:
    """The head and the JSON part of a frame; the raw part follows."""
    text = json.dumps(meta, separators=(",", ":")).encode()
    return HEAD.pack(len(text), body_size) + text


def read_frame(fd: int, body: Buffer) -> dict[str, object] | None:
    """The next frame of a blocking descriptor, its raw part put into the buffer; `None` at the stream's end."""
    head = _exactly(fd, HEAD.size)
    if not head:
        return None
    text_size, body_size = HEAD.unpack(head)
    text = _exactly(fd, text_size)
    body.clear()
    return json.loads(text) if text and body.fill_exactly(fd, body_size) else None


def _exactly(fd: int, size: int) -> bytes:
    """So many bytes; none when the stream ends before."""
    data = os.read(fd, size)
    while 0 < len(data) < size:
        part = os.read(fd, size - len(data))
        data = data + part if part else b""
    return data


def write_all(fd: int, data: bytes | memoryview) -> None:
    """All of it, to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def put(path: str, data: memoryview) -> str:
    """A new file, which stays ours: no job can change it, and we can remove it. What went wrong."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as error:
        return f"{path}: {error.strerror}"
    try:
        write_all(file, data)
    except OSError as error:
        return f"{path}: {error.strerror}"
    finally:
        os.close(file)
    return ""
