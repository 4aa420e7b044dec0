"""The attached stream of a container: Docker's framing outside, ours inside, and no trust in either."""

import asyncio
import json
from collections import deque
from typing import Any, Protocol

from schemas.errors import SandboxLost
from worker.sandbox.agent.wire import HEAD

Reply = asyncio.Future[tuple[dict[str, Any], bytes]]

META_BYTES = 1 << 16
"""Largest JSON part a reply may have."""
STDERR_BYTES = 4096
"""How much of the agent's last words is kept."""


class Listener(Protocol):
    """Who hears what is not an answer, while a session is open."""

    most: int
    """Raw bytes that a frame may have."""

    def frame(self, meta: dict[str, Any], body: bytes) -> None:
        """One frame; `ValueError` if it is not possible."""

    def lost(self, why: str) -> None:
        """The connection has ended."""


class Demultiplexer(asyncio.Protocol):
    """Undoes Docker's framing: 8 bytes of head, of which the first says which stream and the last four how much."""

    def __init__(self, cap: int = STDERR_BYTES) -> None:
        self.over = asyncio.Event()
        self.kept = {1: bytearray(), 2: bytearray()}
        self.total = {1: 0, 2: 0}
        self._cap = cap
        self._docker = bytearray()

    @property
    def exceeded(self) -> bool:
        """Whether one of the streams carried more than is kept."""
        return max(self.total.values()) > self._cap

    def data_received(self, data: bytes) -> None:
        self._docker += data
        while len(self._docker) >= 8:
            size = int.from_bytes(self._docker[4:8], "big")
            if len(self._docker) < 8 + size:
                break
            self.received(2 if self._docker[0] == 2 else 1, bytes(self._docker[8 : 8 + size]))
            del self._docker[: 8 + size]

    def received(self, stream: int, payload: bytes) -> None:
        """Keep up to the cap, count beyond it."""
        self.total[stream] += len(payload)
        self.kept[stream] += payload[: max(0, self._cap - len(self.kept[stream]))]

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()


class Stream(Demultiplexer):
    """Our agent on the other end. Every frame it sends was expected, in this order; any other ends the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.transport: asyncio.Transport | None = None
        self._frames = bytearray()
        self._expected: deque[tuple[Reply, int]] = deque()
        self._lost: str | None = None
        self.listener: Listener | None = None

    @property
    def alive(self) -> bool:
        """Whether the other end is there, as far as is known."""
        return self.transport is not None and self._lost is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._take()

    def received(self, stream: int, payload: bytes) -> None:
        if stream == 1:
            self._frames += payload
        else:
            super().received(stream, payload)  # the agent's last words

    def connection_lost(self, exc: Exception | None) -> None:
        words = self.kept[2].decode("utf-8", "replace").strip().splitlines()
        self.fail(f"the stream ended ({words[-1][:200] if words else exc or 'the container is gone'})")

    def send(self, data: bytes) -> None:
        """Put bytes on their way."""
        if self.transport is not None:
            self.transport.write(data)

    def expect(self, reply_bytes: int) -> Reply:
        """Allow for one frame more, of so many raw bytes at most."""
        if self._lost is not None:
            raise SandboxLost(self._lost)
        reply: Reply = asyncio.get_running_loop().create_future()
        self._expected.append((reply, reply_bytes))
        return reply

    async def arrived(self, reply: Reply, seconds: float) -> tuple[dict[str, Any], bytes]:
        """Await a frame that was allowed for."""
        if reply.done():
            return reply.result()
        try:
            return await asyncio.wait_for(reply, seconds)
        except TimeoutError:
            self.fail(f"no answer within {seconds:.1f} s")
            raise SandboxLost(str(self._lost)) from None

    def close(self) -> None:
        """End the connection; in the container the agent sees it and exits."""
        if self.transport is not None:
            self.transport.abort()

    def _take(self) -> None:
        """Hand over every whole frame that is expected, or listened for."""
        while len(self._frames) >= HEAD.size:
            meta_size, body_size = HEAD.unpack_from(self._frames)
            if not self._expected and self.listener is None:
                return self.fail("the agent spoke without being asked")
            most = self.listener.most if self.listener else self._expected[0][1]
            if meta_size > META_BYTES or body_size > most:
                return self.fail("the agent's reply is too large")
            end = HEAD.size + meta_size + body_size
            if len(self._frames) < end:
                return None
            text = bytes(self._frames[HEAD.size : HEAD.size + meta_size])
            body = bytes(self._frames[HEAD.size + meta_size : end])
            del self._frames[:end]
            try:
                meta = json.loads(text)
            except (ValueError, RecursionError):
                return self.fail("the agent's reply is not JSON")
            if not isinstance(meta, dict):
                return self.fail("the agent's reply is not an object")
            if self.listener is not None:
                try:
                    self.listener.frame(meta, body)
                except (KeyError, ValueError, TypeError) as error:
                    return self.fail(f"the agent's reply is not possible ({error})")
                continue
            reply, _ = self._expected.popleft()
            if not reply.done():  # who expected it may have been cancelled meanwhile
                reply.set_result((meta, body))
        return None

    def fail(self, why: str) -> None:
        """It is over; whoever waits is told why."""
        if self._lost is None:
            self._lost = why
        while self._expected:
            reply, _ = self._expected.popleft()
            if not reply.done():
                reply.set_exception(SandboxLost(self._lost))
                reply.exception()  # it may be that nobody waits any more: that is no news for the log
        if self.listener is not None:
            self.listener.lost(self._lost)
        self.close()
