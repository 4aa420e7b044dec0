"""The worker trusts no reply: every malformed one ends the stream, and not the worker."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from evalpool.schemas import SandboxLost
from evalpool.worker.sandbox.agent.wire import pack
from evalpool.worker.sandbox.line import Line
from evalpool.worker.sandbox.stream import Stream
from tests.conftest import PATIENCE


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


def docker_frame(payload: bytes, kind: int = 1) -> bytes:
    return struct.pack(">BxxxI", kind, len(payload)) + payload


class Attached:
    """A stream that is attached by an engine, as the agent's end sees it."""

    def __init__(self) -> None:
        self.stream, self._wire = Stream(), Wire()
        self.stream.connection_made(self._wire)

    def say(self, data: bytes) -> None:
        self.stream.data_received(docker_frame(data))

    def complain(self, data: bytes) -> None:
        """Write to the agent's error output."""
        self.stream.data_received(docker_frame(data, 2))

    def leave(self) -> None:
        self.stream.connection_lost(None)

    def heard(self, size: int) -> bytes:
        return self._wire.sent[:size]

    async def over(self) -> bool:
        """Return whether the worker has ended the connection."""
        return self._wire.aborted


class Direct(Attached):
    """The same with a direct line."""

    async def connect(self) -> None:
        replies, self._replies = os.pipe()
        self._requests, requests = os.pipe()
        for fd in (replies, requests):
            os.set_blocking(fd, False)
        await self.stream.go_over(Line(replies, requests))

    def say(self, data: bytes) -> None:
        os.write(self._replies, data)

    def leave(self) -> None:
        self.stream.connection_lost(None)  # the container ends with its agent
        os.close(self._replies)

    def heard(self, size: int) -> bytes:
        return os.read(self._requests, size)

    async def over(self) -> bool:
        return await asyncio.to_thread(os.read, self._requests, 1) == b"" and self._wire.aborted


@pytest.fixture(params=[Attached, Direct])
async def agent(request: pytest.FixtureRequest) -> AsyncIterator[Attached]:
    made: Attached = request.param()
    if isinstance(made, Direct):
        await made.connect()
    yield made
    made.stream.close()
    await asyncio.sleep(0)  # until the transports have closed their descriptors


async def ask(made: Stream, frames: list[bytes], most: int, seconds: float) -> tuple[dict[str, Any], bytes]:
    reply = made.expect(most)
    made.send(b"".join(frames))
    return await made.arrived(reply, seconds)


async def test_a_reply_may_arrive_in_any_pieces(agent: Attached) -> None:
    reply = asyncio.create_task(ask(agent.stream, [pack({"id": 1}, 1), b"x"], 100, 10))
    await asyncio.sleep(0)
    agent.complain(b"noise")
    for byte in pack({"id": 1}, 4) + b"body":
        agent.say(bytes([byte]))
        await asyncio.sleep(0)
    assert await reply == ({"id": 1}, b"body")
    sent = pack({"id": 1}, 1) + b"x"
    assert agent.heard(len(sent)) == sent
    assert agent.stream.kept[2] == b"noise"


async def test_the_frames_of_the_engine_may_arrive_in_any_pieces() -> None:
    agent = Attached()
    reply = asyncio.create_task(ask(agent.stream, [], 100, 10))
    await asyncio.sleep(0)
    frame = pack({"id": 1}, 4) + b"body"
    for byte in docker_frame(frame[:3]) + docker_frame(b"noise", 2) + docker_frame(frame[3:]):
        agent.stream.data_received(bytes([byte]))
    assert await reply == ({"id": 1}, b"body")
    assert agent.stream.kept[2] == b"noise"


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
async def test_a_malformed_reply_ends_the_stream(agent: Attached, data: bytes) -> None:
    reply = asyncio.create_task(ask(agent.stream, [], 100, 10))
    await asyncio.sleep(0)
    agent.say(data)
    with pytest.raises(SandboxLost):
        await reply
    assert await agent.over()
    assert not agent.stream.alive


async def test_two_replies_to_one_request_end_the_stream(agent: Attached) -> None:
    reply = asyncio.create_task(ask(agent.stream, [], 0, 10))
    await asyncio.sleep(0)
    agent.say(pack({"id": 1}) * 2)
    await reply
    assert await agent.over()
    with pytest.raises(SandboxLost, match="without being asked"):
        await ask(agent.stream, [], 0, 10)


async def test_an_agent_that_does_not_answer_ends_the_stream(agent: Attached) -> None:
    with pytest.raises(SandboxLost, match="did not answer"):
        await ask(agent.stream, [], 0, 0.01)
    assert await agent.over()


async def test_a_reply_is_still_to_come_when_whoever_waited_for_it_is_cancelled(agent: Attached) -> None:
    reply = agent.stream.expect(0)
    waiter = asyncio.create_task(agent.stream.arrived(reply, 10))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    agent.say(pack({"id": 1}))
    assert await agent.stream.arrived(reply, 10) == ({"id": 1}, b"")


async def test_the_end_of_the_connection_tells_the_agents_last_words(agent: Attached) -> None:
    reply = asyncio.create_task(ask(agent.stream, [], 0, 10))
    await asyncio.sleep(0)
    agent.complain(b"Traceback\nKeyError: 'x'\n")
    agent.leave()
    with pytest.raises(SandboxLost, match="KeyError: 'x'"):
        await reply


async def test_the_end_of_a_direct_line_is_noticed_while_the_engine_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalpool.worker.sandbox.stream.WORDS_SECONDS", 0.1)
    agent = Direct()
    await agent.connect()
    reply = agent.stream.expect(0)
    os.close(agent._replies)
    async with asyncio.timeout(PATIENCE):
        while agent.stream.alive:  # although its last words may still come
            await asyncio.sleep(0)
    assert not reply.done()
    with pytest.raises(SandboxLost, match="the container is gone"):
        await reply
    assert await agent.over()


async def test_what_an_engine_says_for_the_agent_is_no_reply_on_a_direct_line() -> None:
    agent = Direct()
    await agent.connect()
    reply = agent.stream.expect(100)
    agent.stream.data_received(docker_frame(pack({"id": 1}, 4) + b"fake"))
    agent.say(pack({"id": 1}, 4) + b"true")
    assert await reply == ({"id": 1}, b"true")
    agent.stream.close()
