"""The connection to an agent: the attached stream of its container (Docker's framing outside, ours inside), or the
direct line, if there is one. Neither is trusted."""

import asyncio
import json
import os
import struct
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from evalpool.schemas.errors import SandboxLost
from evalpool.worker.sandbox.agent.wire import HEAD
from evalpool.worker.sandbox.line import Line


class Frame(NamedTuple):
    """One frame of the agent's: its JSON part and its raw part."""

    meta: dict[str, Any]
    body: bytes


Reply = asyncio.Future[Frame]

DOCKER = struct.Struct(">BxxxI")
"""The head of Docker's frames."""
META_BYTES = 1 << 16
"""Size of the JSON part of a reply, at most."""
LARGE = 1 << 20
"""Bytes from which on copying takes a while."""
STDERR_BYTES = 4096
"""How much of the agent's error output is kept."""
WORDS_SECONDS = 1.0
"""How long an agent's last words may take after the end of its direct line, as they come through the engine."""


class Listener(Protocol):
    """Hears the frames of a session, which are not answers to single requests."""

    most: int
    """Raw bytes that a frame may have, at most."""

    def frame(self, meta: dict[str, Any], body: bytes) -> None:
        """Take one frame; raise `ValueError` if it is not possible."""

    def lost(self, why: str) -> None:
        """Take note that the connection has ended, and why."""


class Demultiplexer(asyncio.Protocol):
    """Undoes Docker's framing: a head of 8 bytes, the first of which is the stream and the last four the length."""

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
        start = 0
        while len(self._docker) >= start + DOCKER.size:
            kind, size = DOCKER.unpack_from(self._docker, start)
            if len(self._docker) < start + DOCKER.size + size:
                break
            start += DOCKER.size + size
            self.received(2 if kind == 2 else 1, bytes(self._docker[start - size : start]))
        del self._docker[:start]

    def received(self, stream: int, payload: bytes) -> None:
        """Keep up to the cap, count beyond it."""
        self.total[stream] += len(payload)
        self.kept[stream] += payload[: max(0, self._cap - len(self.kept[stream]))]

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()


class Stream(Demultiplexer):
    """The connection to our agent. Frames must be expected, and come in that order; any other ends the connection.

    It begins on the attached stream and goes over to the direct line, if there is one. Then the attached stream only
    carries the agent's last words, and its end means nothing: the engine may have been restarted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transport: asyncio.WriteTransport | None = None
        """Where requests are written to."""
        self._transports: list[asyncio.BaseTransport] = []
        self._direct = self._hung_up = False
        self._frames = bytearray()
        self._expected: deque[tuple[Reply, int]] = deque()
        self._lost: str | None = None
        self.listener: Listener | None = None

    @property
    def alive(self) -> bool:
        """Whether the agent is there, as far as is known."""
        return self.transport is not None and self._lost is None and not self._hung_up

    @property
    def direct(self) -> bool:
        """Whether the direct line is used."""
        return self._direct

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        self._transports.append(transport)

    async def go_over(self, line: Line) -> None:
        """Use the direct line from now on, for both directions."""
        loop = asyncio.get_running_loop()
        self._direct = True
        ends = [os.fdopen(line.replies, "rb", 0), os.fdopen(line.requests, "wb", 0)]
        try:
            reader, _ = await loop.connect_read_pipe(lambda: _End(self), ends[0])
            self._transports.append(reader)
            del ends[0]  # the transport closes it
            self.transport, _ = await loop.connect_write_pipe(lambda: _End(self), ends[0])
            self._transports.append(self.transport)
            del ends[0]
        finally:
            for end in ends:
                end.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._direct:
            self._take()

    def received(self, stream: int, payload: bytes) -> None:
        if stream == 1 and not self._direct:
            self._frames += payload
        else:
            super().received(stream, payload)  # error output of the agent: its last words

    def heard(self, data: bytes) -> None:
        """Take bytes from the direct line."""
        self._frames += data
        self._take()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self._direct or self._hung_up:
            self._end(exc)

    def hung_up(self, exc: Exception | None) -> None:
        """Take note that the direct line has ended, and so has the agent. Its last words may still be on their way."""
        self._hung_up = True
        if self.over.is_set() or self._lost is not None:
            self._end(exc)
        else:
            asyncio.get_running_loop().call_later(WORDS_SECONDS, self._end, exc)

    def _end(self, exc: Exception | None) -> None:
        words = self.kept[2].decode("utf-8", "replace").strip().splitlines()
        self.fail(
            f"the connection to the sandbox ended ({words[-1][:200] if words else exc or 'the container is gone'})"
        )

    def send(self, *parts: bytes) -> None:
        """Send bytes: small parts in one piece, large ones without another copy."""
        if self.transport is None:
            return
        for part in (b"".join(parts),) if sum(map(len, parts)) < LARGE else parts:
            self.transport.write(memoryview(part))

    def expect(self, reply_bytes: int) -> Reply:
        """Expect one frame more, of at most `reply_bytes` raw bytes."""
        if self._lost is not None:
            raise SandboxLost(self._lost)
        reply: Reply = asyncio.get_running_loop().create_future()
        self._expected.append((reply, reply_bytes))
        return reply

    async def arrived(self, reply: Reply, seconds: float) -> Frame:
        """Return a frame that is expected, when it has come; after so many seconds, the sandbox is lost."""
        if not reply.done():
            # The reply is still to come if whoever waits for it is cancelled, and must not be cancelled with them.
            await asyncio.wait((reply,), timeout=seconds)
        if not reply.done():
            self.fail("the agent did not answer in time")  # which is now the error of the reply
        return reply.result()

    def close(self) -> None:
        """End the connection; the agent in the container notices that and exits."""
        while self._transports:
            transport = self._transports.pop()
            if transport.is_closing():
                continue
            try:
                transport.abort() if isinstance(transport, asyncio.WriteTransport) else transport.close()
            except RuntimeError:  # it belongs to another event loop, which is gone and can close nothing any more
                lose: Any = getattr(transport, "_call_connection_lost")  # noqa: B009 - asyncio offers no other way
                with suppress(RuntimeError):
                    lose(None)

    def _take(self) -> None:
        """Hand over every whole frame that is expected, or listened for."""
        try:
            while (frame := self._next()) is not None:
                if self.listener is not None:
                    self.listener.frame(*frame)
                    continue
                reply, _ = self._expected.popleft()
                if not reply.done():  # whoever expected it may have been cancelled meanwhile
                    reply.set_result(frame)
        except SandboxLost as error:
            self.fail(str(error))
        except (KeyError, ValueError, TypeError) as error:
            self.fail(f"the agent sent an impossible reply ({error})")

    def _next(self) -> Frame | None:
        """Return the next frame, or None if it is not whole yet. Raises `SandboxLost` if it is not acceptable."""
        if len(self._frames) < HEAD.size:
            return None
        meta_size, body_size = HEAD.unpack_from(self._frames)
        if not self._expected and self.listener is None:
            raise SandboxLost("the agent sent a frame without being asked")
        most = self.listener.most if self.listener else self._expected[0][1]
        if meta_size > META_BYTES or body_size > most:
            raise SandboxLost("the agent sent a reply that is too large")
        end = HEAD.size + meta_size + body_size
        if len(self._frames) < end:
            return None
        with memoryview(self._frames) as view:  # so that tens of megabytes are copied once, not twice
            text, body = bytes(view[HEAD.size : HEAD.size + meta_size]), bytes(view[HEAD.size + meta_size : end])
        del self._frames[:end]
        try:
            meta = json.loads(text)
        except (ValueError, RecursionError):
            raise SandboxLost("the agent sent a reply that is not JSON") from None
        if not isinstance(meta, dict):
            raise SandboxLost("the agent sent a reply that is not a JSON object")
        return Frame(meta, body)

    def fail(self, why: str) -> None:
        """End the connection, and tell whoever waits why."""
        if self._lost is None:
            self._lost = why
        while self._expected:
            reply, _ = self._expected.popleft()
            if not reply.done():
                reply.set_exception(SandboxLost(self._lost))
                reply.exception()  # perhaps nobody waits any more, and the log needs no entry for that
        if self.listener is not None:
            self.listener.lost(self._lost)
        self.close()


class _End(asyncio.Protocol):
    """One end of the direct line."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def data_received(self, data: bytes) -> None:
        self._stream.heard(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.hung_up(exc)
