"""Several sandboxes under one roof: made, listed, used and removed by their ids; and a pool of warm ones."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

from schemas.sandbox import (
    SandboxConfig,
    SandboxInfo,
    SandboxManagerConfig,
    SandboxManagerType,
    SandboxStatus,
    SandboxType,
    ToolResult,
)
from worker.library.box import BoxSandbox
from worker.library.factory import SandboxFactory
from worker.library.sandbox import Sandbox
from worker.pool import Pool
from worker.sandbox.base import Sandbox as Box
from worker.sandbox.base import Shape

log = logging.getLogger("evalpool.sandbox")

LOOK_SECONDS = 300.0
MAX_USES = 1000


class LocalSandboxManager:
    """The sandboxes of this process. All of them end with it, and with `async with`."""

    def __init__(self, config: SandboxManagerConfig | None = None, **fields: Any) -> None:
        self.config = config or SandboxManagerConfig(**fields)
        self._sandboxes: dict[str, Sandbox] = {}
        self._pool: Pool | None = None
        self._model: BoxSandbox | None = None
        """What its members are like; never started itself."""
        self._shape: Shape | None = None
        self._members: dict[Box, BoxSandbox] = {}
        """The pool lends boxes; these are the sandboxes around them."""
        self._pool_size = 0
        self._running = False
        self._filling = asyncio.Lock()
        self._look: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look after them."""
        if not self._running:
            self._running = True
            self._look = asyncio.create_task(self._look_after())

    async def stop(self) -> None:
        """End all of them."""
        self._running = False
        look, self._look = self._look, None
        if look is not None:
            look.cancel()
            await asyncio.wait((look,))
        await self.cleanup_all_sandboxes()

    async def create_sandbox(
        self,
        sandbox_type: str = SandboxType.DOCKER,
        config: SandboxConfig | dict[str, Any] | None = None,
        sandbox_id: str | None = None,
    ) -> str:
        """A started sandbox; its id. One that cannot be started leaves nothing behind."""
        sandbox = SandboxFactory.create_sandbox(sandbox_type, config, sandbox_id)
        if sandbox.id in self._sandboxes:
            raise ValueError(f"sandbox_id: there is a sandbox {sandbox.id} already")
        self._sandboxes[sandbox.id] = sandbox
        try:
            await sandbox.start()
        except BaseException as error:
            self._sandboxes.pop(sandbox.id, None)
            if isinstance(error, Exception):
                raise RuntimeError(f"Failed to create sandbox: {error}") from error
            raise
        return sandbox.id

    async def get_sandbox(self, sandbox_id: str) -> Sandbox | None:
        """By its id, if it is here."""
        members = {sandbox.id: sandbox for sandbox in self._members.values()}
        return self._sandboxes.get(sandbox_id) or members.get(sandbox_id)

    async def get_sandbox_info(self, sandbox_id: str) -> SandboxInfo | None:
        """How it is now, if it is here."""
        sandbox = await self.get_sandbox(sandbox_id)
        return sandbox.get_info() if sandbox else None

    async def list_sandboxes(self, status_filter: SandboxStatus | str | None = None) -> list[SandboxInfo]:
        """All of them, those of the pool included; or those of one status."""
        await self._bury()
        wanted = None if status_filter is None else SandboxStatus(status_filter)
        infos = [sandbox.get_info() for sandbox in (*self._sandboxes.values(), *self._members.values())]
        return [info for info in infos if wanted in (None, info.status)]

    async def execute_tool(
        self, sandbox_id: str, tool_name: str, parameters: dict[str, Any] | None = None
    ) -> ToolResult:
        """What a tool of this sandbox does."""
        return await (await self._known(sandbox_id)).execute_tool(tool_name, parameters)

    async def get_sandbox_tools(self, sandbox_id: str) -> dict[str, Any]:
        """Its tools, in the form in which models are told of functions."""
        sandbox = await self.get_sandbox(sandbox_id)
        if sandbox is None:
            raise ValueError(f"Sandbox {sandbox_id} not found")
        return sandbox.get_available_tools()

    async def put_archive(self, sandbox_id: str, target_dir: str, data: bytes) -> bool:
        """Unpack a tar archive in a folder of it."""
        return await (await self._known(sandbox_id)).put_archive(target_dir, data)

    async def put_dir(self, sandbox_id: str, source_dir: str | Path, target_dir: str) -> bool:
        """Copy a folder into it."""
        return await (await self._known(sandbox_id)).put_dir(source_dir, target_dir)

    async def stop_sandbox(self, sandbox_id: str) -> bool:
        """End it, and keep it in the list; whether it was there."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None:
            await sandbox.stop()
        return sandbox is not None

    async def delete_sandbox(self, sandbox_id: str) -> bool:
        """End and forget it; whether it was there."""
        sandbox = self._sandboxes.pop(sandbox_id, None)
        if sandbox is None:
            return False
        try:
            await sandbox.stop()
        finally:
            await sandbox.cleanup()
        return True

    async def cleanup_all_sandboxes(self) -> None:
        """End and forget all of them, those of the pool included."""
        async with self._filling:
            pool, self._pool, self._model, self._shape = self._pool, None, None, None
            if pool is not None:
                await pool.close()
        members, self._members = self._members, {}
        ended = await asyncio.gather(
            *(self.delete_sandbox(sandbox_id) for sandbox_id in list(self._sandboxes)),
            *(member.stop() for member in members.values()),
            return_exceptions=True,
        )
        for error in ended:
            if isinstance(error, Exception):
                log.warning("a sandbox did not end well: %s", error, extra={"action": "sandbox_error"})

    async def get_stats(self) -> dict[str, Any]:
        """Counts, for people and monitors."""
        infos = await self.list_sandboxes()
        return {
            "manager_type": SandboxManagerType.LOCAL.value,
            "total_sandboxes": len(infos),
            "status_counts": dict(Counter(info.status.value for info in infos)),
            "sandbox_types": dict(Counter(info.type for info in infos)),
            "running": self._running,
            "cleanup_interval": self.config.cleanup_interval or LOOK_SECONDS,
            "pool_size": self._pool_size,
            "pool_enabled": self._pool is not None,
            "pool_initialized": self._pool is not None,
            "pool": self._pool.snapshot()["counts"] if self._pool else {},
        }

    async def initialize_pool(
        self,
        pool_size: int | None = None,
        sandbox_type: str = SandboxType.DOCKER,
        config: SandboxConfig | dict[str, Any] | None = None,
    ) -> list[str]:
        """So many warm sandboxes, made side by side; their ids. A manager has one pool: that stays as it is."""
        async with self._filling:
            return await self._fill(pool_size, sandbox_type, config)

    async def _fill(
        self, pool_size: int | None, sandbox_type: str, config: SandboxConfig | dict[str, Any] | None
    ) -> list[str]:
        if self._pool is not None and self._model is not None:
            asked = SandboxFactory.create_sandbox(sandbox_type, config) if config else self._model
            if (asked.sandbox_type, asked.config) != (self._model.sandbox_type, self._model.config):
                raise ValueError("config: there is a pool of other sandboxes already; another manager can have one")
            if pool_size not in (None, self._pool_size):
                log.warning("the pool has %d members already, and stays so", self._pool_size)
            return [member.id for member in self._members.values()]
        size = self.config.pool_size if pool_size is None else pool_size
        if type(size) is not int or size < 1:
            raise ValueError(f"pool_size: {size!r} is not a number of sandboxes")
        config = config or self.config.sandbox_config
        model = SandboxFactory.create_sandbox(sandbox_type, config)
        if not isinstance(model, BoxSandbox):
            raise ValueError(f"sandbox_type: sandboxes of the type {sandbox_type} cannot be reset, and so not pooled")
        volumes = getattr(model.config, "volumes", {})
        if any(mount.get("mode", "rw") == "rw" for mount in volumes.values()):
            raise ValueError("volumes: those of a pool must be of mode 'ro'; what is written goes with the next reset")
        await model.initialize_tools()

        async def make(_: Shape) -> Box:
            member = SandboxFactory.create_sandbox(sandbox_type, config)
            assert isinstance(member, BoxSandbox)
            await member.start()
            member.update_status(SandboxStatus.IDLE)
            assert member.box is not None
            self._members[member.box] = member
            return member.box

        pool = Pool(make, size, MAX_USES, spare=0)
        try:
            await pool.warm(model.shape)
        except BaseException:
            await pool.close()
            members, self._members = self._members, {}
            await asyncio.gather(*(member.stop() for member in members.values()), return_exceptions=True)
            raise
        self._pool, self._pool_size, self._model = pool, size, model
        self._shape = next(iter(self._members)).shape  # with the image that was found for it
        return [member.id for member in self._members.values()]

    async def execute_tool_in_pool(
        self, tool_name: str, parameters: dict[str, Any] | None = None, timeout: float | None = None
    ) -> ToolResult:
        """What a tool does in a sandbox of the pool that nothing else is in; it is reset afterwards. `TimeoutError`
        where none is free in time."""
        if self._pool is None or self._shape is None or self._model is None:
            raise ValueError("Sandbox pool is empty, call initialize_pool first")
        self._model.the_tool(tool_name)  # a call that cannot be done costs no sandbox
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(timeout):
                    box = await stack.enter_async_context(self._pool.lend(self._shape))
            except TimeoutError:
                raise TimeoutError(f"Timeout waiting for available sandbox from pool after {timeout}s") from None
            member = self._members[box]
            member.update_status(SandboxStatus.BUSY)
            await member.renew()
            try:
                return await member.execute_tool(tool_name, parameters)
            finally:
                if member.status is SandboxStatus.BUSY:
                    member.update_status(SandboxStatus.IDLE)

    async def _known(self, sandbox_id: str) -> Sandbox:
        """To work in. Those of the pool are for one call at a time, and reset behind it."""
        if sandbox_id in self._sandboxes:
            return self._sandboxes[sandbox_id]
        if await self.get_sandbox(sandbox_id):
            raise ValueError(f"Sandbox {sandbox_id} belongs to the pool: use execute_tool_in_pool")
        raise ValueError(f"Sandbox {sandbox_id} not found")

    async def _bury(self) -> None:
        """Members that the pool has put away, or that have died: it makes others."""
        for box in [box for box in self._members if not box.alive]:
            if member := self._members.pop(box, None):  # somebody else may do the same
                await member.stop()

    async def _look_after(self) -> None:
        """Forget what has died of itself."""
        while True:
            await asyncio.sleep(self.config.cleanup_interval or LOOK_SECONDS)
            try:
                await self._bury()
                for sandbox_id, sandbox in list(self._sandboxes.items()):
                    if sandbox.get_info().status is SandboxStatus.ERROR:
                        await self.delete_sandbox(sandbox_id)
            except Exception as error:  # of one of them; the others, and those to come, are looked after all the same
                log.warning("a sandbox did not end well: %s", error, extra={"action": "sandbox_error"})

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class SandboxManagerFactory:
    """Makes managers."""

    _types: ClassVar[dict[str, Callable[..., LocalSandboxManager]]] = {SandboxManagerType.LOCAL: LocalSandboxManager}

    @classmethod
    def create_manager(
        cls, manager_type: str | None = None, config: SandboxManagerConfig | None = None, **fields: Any
    ) -> LocalSandboxManager:
        """The one of this type; without one, the type that the configuration asks for."""
        config = config or SandboxManagerConfig(**fields)
        kind = manager_type or (SandboxManagerType.HTTP if config.base_url else SandboxManagerType.LOCAL)
        if str(kind) not in cls._types:
            raise ValueError(f"manager_type: there is no {kind!s}; known: {', '.join(cls.get_registered_types())}")
        return cls._types[str(kind)](config)

    @classmethod
    def get_registered_types(cls) -> list[str]:
        """Their names."""
        return [str(kind) for kind in cls._types]
