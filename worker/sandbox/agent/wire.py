"""Frames: how the agent and its worker talk. One frame is two lengths, a small JSON object, and raw bytes.

4 bytes   length of the JSON part        4 bytes   length of the raw part
JSON      {"id": 7, …}                   raw       e.g. standard output followed by standard error
"""

import json
import os
import struct

HEAD = struct.Struct(">II")


def pack(meta: dict[str, object], body: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(meta, separators=(",", ":")).encode()
    return HEAD.pack(len(text), len(body)) + text + body


def read_frame(fd: int) -> tuple[dict[str, object], bytes] | None:
    """The next frame of a blocking descriptor; `None` at its end."""
    head = read_exactly(fd, HEAD.size)
    if head is None:
        return None
    text_size, body_size = HEAD.unpack(head)
    text, body = read_exactly(fd, text_size), read_exactly(fd, body_size)
    if text is None or body is None:
        return None
    return json.loads(text), body


def read_exactly(fd: int, size: int) -> bytes | None:
    """So many bytes; `None` when the stream ends before."""
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    """All of it, to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
