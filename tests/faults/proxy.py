"""A proxy in front of a Redis (TCP) or a Docker engine (a socket file), which can be slow, lossy, silent or dead."""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

Address = Path | tuple[str, int]
"""A socket file, or host and port."""


class Link:
    """One connection through the proxy."""

    def __init__(self) -> None:
        self.dead = False
        """Whether the connection is half open: nothing passes, and neither end knows."""
        self.writers: list[asyncio.StreamWriter] = []
        self.held = False
        """Whether the answer to the current request is to come late."""


class Proxy:
    """Forwards bytes, in a thread of its own, and misbehaves on request."""

    def __init__(self, upstream: Address, listen: Address, seed: int = 0) -> None:
        self._upstream, self._listen = upstream, listen
        self.delay = 0.0
        """Seconds by which every piece of data is delayed."""
        self.loss = 0.0
        """The share of pieces that arrive only after a retransmission."""
        self.late: tuple[bytes, float] | None = None
        """A part of the first line of requests, and by how many seconds their answers are delayed."""
        self.accepted = 0
        self._random = random.Random(seed)
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._passing = asyncio.Event()
        self._passing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    @property
    def url(self) -> str:
        """The address for a worker, as the URL of a Redis or of a Docker engine."""
        return f"unix://{self._listen}" if isinstance(self._listen, Path) else f"redis://127.0.0.1:{self._listen[1]}/0"

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- the faults --------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Let nothing pass, on old connections or new ones, without closing them."""
        self._do(self._passing.clear)

    def thaw(self) -> None:
        """Let everything pass again, including what has waited."""
        self._do(self._passing.set)

    def blackhole(self) -> int:
        """Make the present connections half open for ever, and return how many there were. New ones work."""

        def silence() -> int:
            for link in self._links:
                link.dead = True
            return len(self._links)

        return self._do(silence)

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        self._call(self._shut())

    def mend(self) -> None:
        """Accept connections again."""
        self._call(self._open())

    # -- on the loop -------------------------------------------------------------------------------

    async def _open(self) -> None:
        if self._server is not None:
            return
        if isinstance(self._listen, Path):
            self._listen.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, self._listen)
        else:
            self._server = await asyncio.start_server(self._serve, *self._listen)

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for link in list(self._links):
            for writer in link.writers:
                writer.transport.abort()

    async def _close(self) -> None:
        await self._shut()
        for _ in range(10):  # rounds of the loop: a connection may be accepted and not yet served, or not yet closed
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        link = Link()
        link.writers.append(writer)
        self._links.add(link)
        try:
            await self._passing.wait()
            if isinstance(self._upstream, Path):
                back, forth = await asyncio.open_unix_connection(self._upstream)
            else:
                back, forth = await asyncio.open_connection(*self._upstream)
            link.writers.append(forth)
            pumps = (self._pump(link, reader, forth, asking=True), self._pump(link, back, writer, asking=False))
            await asyncio.gather(*pumps)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._links.discard(link)
            self._tasks.discard(task)
            for each in link.writers:
                each.transport.abort()

    async def _pump(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asking: bool
    ) -> None:
        while data := await reader.read(1 << 16):
            await self._weather(link, data, asking)
            writer.write(data)
            await writer.drain()
        await self._weather(link, b"", asking)
        if not asking:
            writer.close()
        elif writer.can_write_eof():
            with suppress(OSError):
                writer.write_eof()

    async def _weather(self, link: Link, data: bytes, asking: bool) -> None:
        if self.late is not None:
            words, seconds = self.late
            if asking and words in data.partition(b"\r\n")[0]:
                link.held = True
            elif not asking and link.held:
                link.held = False
                await asyncio.sleep(seconds)
        if self.delay:
            await asyncio.sleep(self.delay)
        if self.loss and self._random.random() < self.loss:
            await asyncio.sleep(self._random.uniform(0.2, 1.0))  # until TCP has sent it again
        await self._passing.wait()
        if link.dead:
            await asyncio.Event().wait()

    def _do(self, function: Callable[[], Any]) -> Any:
        async def on_the_loop() -> Any:
            return function()

        return self._call(on_the_loop())

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)
