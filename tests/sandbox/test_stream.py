"""The worker trusts no reply: every malformed one ends the stream, and not the worker."""

import asyncio
import struct
from typing import Any

import pytest

from evalpool.schemas import SandboxLost
from evalpool.worker.sandbox.agent.wire import pack
from evalpool.worker.sandbox.stream import Stream


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def abort(self) -> None:
        self.aborted = True


def docker_frame(payload: bytes, kind: int = 1) -> bytes:
    return struct.pack(">BxxxI", kind, len(payload)) + payload


def stream() -> tuple[Stream, Wire]:
    made, wire = Stream(), Wire()
    made.connection_made(wire)
    return made, wire


async def ask(made: Stream, frames: list[bytes], most: int, seconds: float) -> tuple[dict[str, Any], bytes]:
    reply = made.expect(most)
    made.send(b"".join(frames))
    return await made.arrived(reply, seconds)


async def test_a_reply_may_arrive_in_any_pieces() -> None:
    made, wire = stream()
    reply = asyncio.create_task(ask(made, [pack({"id": 1}, 1), b"x"], 100, 10))
    await asyncio.sleep(0)
    frame = pack({"id": 1}, 4) + b"body"
    data = docker_frame(frame[:3]) + docker_frame(b"noise", 2) + docker_frame(frame[3:])
    for byte in data:
        made.data_received(bytes([byte]))
    assert await reply == ({"id": 1}, b"body")
    assert wire.sent == pack({"id": 1}, 1) + b"x"
    assert made.kept[2] == b"noise"


@pytest.mark.parametrize(
    "data",
    [
        pack({"id": 1}, 101) + b"x" * 101,
        struct.pack(">II", 1 << 30, 0),
        struct.pack(">II", 4, 0) + b"{{{{",
        struct.pack(">II", 2, 0) + b"[]",
        struct.pack(">II", 2, 0) + b"\xff\xfe",
    ],
)
async def test_a_malformed_reply_ends_the_stream(data: bytes) -> None:
    made, wire = stream()
    reply = asyncio.create_task(ask(made, [], 100, 10))
    await asyncio.sleep(0)
    made.data_received(docker_frame(data))
    with pytest.raises(SandboxLost):
        await reply
    assert wire.aborted
    assert not made.alive


async def test_two_replies_to_one_request_end_the_stream() -> None:
    made, wire = stream()
    reply = asyncio.create_task(ask(made, [], 0, 10))
    await asyncio.sleep(0)
    made.data_received(docker_frame(pack({"id": 1}) * 2))
    await reply
    assert wire.aborted
    with pytest.raises(SandboxLost, match="without being asked"):
        await ask(made, [], 0, 10)


async def test_an_agent_that_does_not_answer_ends_the_stream() -> None:
    made, wire = stream()
    with pytest.raises(SandboxLost, match="did not answer"):
        await ask(made, [], 0, 0.01)
    assert wire.aborted


async def test_the_end_of_the_connection_tells_the_agents_last_words() -> None:
    made, _ = stream()
    reply = asyncio.create_task(ask(made, [], 0, 10))
    await asyncio.sleep(0)
    made.data_received(docker_frame(b"Traceback\nKeyError: 'x'\n", 2))
    made.connection_lost(None)
    with pytest.raises(SandboxLost, match="KeyError: 'x'"):
        await reply
