"""Manages several sandboxes, which are created, listed, used and removed by their ids, and a pool of warm ones."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

from evalpool.api.sandbox.box import BoxSandbox
from evalpool.api.sandbox.factory import SandboxFactory
from evalpool.api.sandbox.sandbox import Sandbox
from evalpool.schemas.errors import InvalidCall, InvalidConfig
from evalpool.schemas.sandbox import (
    SandboxConfig,
    SandboxInfo,
    SandboxManagerConfig,
    SandboxManagerType,
    SandboxStatus,
    SandboxType,
    ToolResult,
)
from evalpool.worker.pool import Pool
from evalpool.worker.sandbox.base import Box, Shape

log = logging.getLogger("evalpool.sandbox")

LOOK_SECONDS = 300.0
"""Seconds between two searches for dead sandboxes, unless the configuration says otherwise."""
MAX_USES = 1000
"""Calls after which a sandbox of the pool is replaced."""


class LocalSandboxManager:
    """The sandboxes of this process. They all end with the process, or with the end of `async with`."""

    def __init__(self, config: SandboxManagerConfig | None = None, **fields: Any) -> None:
        if config is not None and not isinstance(config, SandboxManagerConfig):
            raise InvalidConfig(f"config: it must be a SandboxManagerConfig, not {type(config).__name__}")
        self.config = config or SandboxManagerConfig(**fields)
        self._sandboxes: dict[str, Sandbox] = {}
        self._pool: Pool | None = None
        self._model: BoxSandbox | None = None
        """The pattern of the pool's members, which is never started itself."""
        self._shape: Shape | None = None
        self._members: dict[Box, BoxSandbox] = {}
        """The sandboxes of the pool, by the boxes that the pool lends."""
        self._pool_size = 0
        self._running = False
        self._filling = asyncio.Lock()
        self._look: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to search for dead sandboxes from time to time."""
        if not self._running:
            self._running = True
            self._look = asyncio.create_task(self._look_after())

    async def stop(self) -> None:
        """Stop all sandboxes, and the search for dead ones."""
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
        """Create and start a sandbox, and return its id. Raises `RuntimeError` if it cannot be started."""
        sandbox = SandboxFactory.create_sandbox(sandbox_type, config, sandbox_id)
        if sandbox.id in self._sandboxes:
            raise InvalidCall(f"sandbox_id: there is a sandbox {sandbox.id} already")
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
        """Return the sandbox with this id, or `None`."""
        members = {sandbox.id: sandbox for sandbox in self._members.values()}
        return self._sandboxes.get(sandbox_id) or members.get(sandbox_id)

    async def get_sandbox_info(self, sandbox_id: str) -> SandboxInfo | None:
        """Return the present state of a sandbox, or `None` if the id is unknown."""
        sandbox = await self.get_sandbox(sandbox_id)
        return sandbox.get_info() if sandbox else None

    async def list_sandboxes(self, status_filter: SandboxStatus | str | None = None) -> list[SandboxInfo]:
        """Return the state of all sandboxes, including the pool's, or of those with one status."""
        await self._bury()
        if status_filter is not None and status_filter not in list(SandboxStatus):
            raise InvalidCall(f"status_filter: {status_filter!r} is not one of {', '.join(SandboxStatus)}")
        wanted = None if status_filter is None else SandboxStatus(status_filter)
        infos = [sandbox.get_info() for sandbox in (*self._sandboxes.values(), *self._members.values())]
        return [info for info in infos if wanted in (None, info.status)]

    async def execute_tool(
        self, sandbox_id: str, tool_name: str, parameters: dict[str, Any] | None = None
    ) -> ToolResult:
        """Execute a tool of a sandbox and return its result. Raises `InvalidCall` if there is no such sandbox or
        tool."""
        return await (await self._known(sandbox_id)).execute_tool(tool_name, parameters)

    async def get_sandbox_tools(self, sandbox_id: str) -> dict[str, Any]:
        """Return the tools of a sandbox as function schemas for a model."""
        sandbox = await self.get_sandbox(sandbox_id)
        if sandbox is None:
            raise InvalidCall(f"Sandbox {sandbox_id} not found")
        return sandbox.get_available_tools()

    async def put_archive(self, sandbox_id: str, target_dir: str, data: bytes) -> bool:
        """Unpack a tar archive in a folder of a sandbox."""
        return await (await self._known(sandbox_id)).put_archive(target_dir, data)

    async def put_dir(self, sandbox_id: str, source_dir: str | Path, target_dir: str) -> bool:
        """Copy a folder of the host into a sandbox."""
        return await (await self._known(sandbox_id)).put_dir(source_dir, target_dir)

    async def stop_sandbox(self, sandbox_id: str) -> bool:
        """Stop a sandbox but keep it in the list. Returns whether the id is known."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None:
            await sandbox.stop()
        return sandbox is not None

    async def delete_sandbox(self, sandbox_id: str) -> bool:
        """Stop a sandbox and remove it from the list. Returns whether the id was known."""
        sandbox = self._sandboxes.pop(sandbox_id, None)
        if sandbox is None:
            return False
        try:
            await sandbox.stop()
        finally:
            await sandbox.cleanup()
        return True

    async def cleanup_all_sandboxes(self) -> None:
        """Stop and remove all sandboxes, including the pool."""
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
                log.warning("a sandbox could not be stopped: %s", error, extra={"action": "sandbox_error"})

    async def get_stats(self) -> dict[str, Any]:
        """Return counts for people and for monitoring."""
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
        """Create a pool of so many warm sandboxes and return their ids. A manager has one pool: if there is one
        already, it stays as it is."""
        async with self._filling:
            return await self._fill(pool_size, sandbox_type, config)

    async def _fill(
        self, pool_size: int | None, sandbox_type: str, config: SandboxConfig | dict[str, Any] | None
    ) -> list[str]:
        if self._pool is not None and self._model is not None:
            asked = SandboxFactory.create_sandbox(sandbox_type, config) if config else self._model
            if (asked.sandbox_type, asked.config) != (self._model.sandbox_type, self._model.config):
                raise InvalidCall("config: this manager has a pool of other sandboxes already; use another manager")
            if pool_size not in (None, self._pool_size):
                log.warning("the pool has %d sandboxes already and keeps this size", self._pool_size)
            return [member.id for member in self._members.values()]
        size = self.config.pool_size if pool_size is None else pool_size
        if type(size) is not int or size < 1:
            raise InvalidCall(f"pool_size: {size!r} is not a positive whole number")
        config = config or self.config.sandbox_config
        model = _model(sandbox_type, config)
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
        """Execute a tool in a sandbox of the pool, which is reset afterwards. Raises `TimeoutError` if no sandbox
        becomes free within `timeout` seconds."""
        if self._pool is None or self._shape is None or self._model is None:
            raise InvalidCall("Sandbox pool is empty, call initialize_pool first")
        self._model.the_tool(tool_name)  # an unknown tool must not cost a sandbox
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
        """Return a sandbox to work in. Those of the pool are refused: they serve one call at a time and are then
        reset."""
        if sandbox_id in self._sandboxes:
            return self._sandboxes[sandbox_id]
        if await self.get_sandbox(sandbox_id):
            raise InvalidCall(f"Sandbox {sandbox_id} belongs to the pool: use execute_tool_in_pool")
        raise InvalidCall(f"Sandbox {sandbox_id} not found")

    async def _bury(self) -> None:
        """Remove sandboxes of the pool that have died or that the pool has discarded. The pool replaces them."""
        for box in [box for box in self._members if not box.alive]:
            if member := self._members.pop(box, None):  # another task may have removed it meanwhile
                await member.stop()

    async def _look_after(self) -> None:
        """Remove dead sandboxes from time to time."""
        while True:
            await asyncio.sleep(self.config.cleanup_interval or LOOK_SECONDS)
            try:
                await self._bury()
                for sandbox_id, sandbox in list(self._sandboxes.items()):
                    if sandbox.get_info().status is SandboxStatus.ERROR:
                        await self.delete_sandbox(sandbox_id)
            except Exception as error:  # one failure must not end the search for the others
                log.warning("a sandbox could not be stopped: %s", error, extra={"action": "sandbox_error"})

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def _model(sandbox_type: str, config: SandboxConfig | dict[str, Any] | None) -> BoxSandbox:
    """Return the pattern of a pool's members. Raises `InvalidCall` if such sandboxes cannot be in a pool."""
    model = SandboxFactory.create_sandbox(sandbox_type, config)
    if not isinstance(model, BoxSandbox):
        raise InvalidCall(f"sandbox_type: a pool needs sandboxes that can be reset, and type {sandbox_type} cannot")
    volumes = getattr(model.config, "volumes", {})
    if any(mount.get("mode", "rw") == "rw" for mount in volumes.values()):
        raise InvalidCall("volumes: a pool's volumes must have the mode 'ro', since each reset deletes what is written")
    return model


class SandboxManagerFactory:
    """Creates managers by type."""

    _types: ClassVar[dict[str, Callable[..., LocalSandboxManager]]] = {SandboxManagerType.LOCAL: LocalSandboxManager}

    @classmethod
    def create_manager(
        cls, manager_type: str | None = None, config: SandboxManagerConfig | None = None, **fields: Any
    ) -> LocalSandboxManager:
        """Create a manager of this type, by default of the type that suits the configuration."""
        config = config or SandboxManagerConfig(**fields)
        kind = manager_type or (SandboxManagerType.HTTP if config.base_url else SandboxManagerType.LOCAL)
        if str(kind) not in cls._types:
            known = ", ".join(cls.get_registered_types())
            raise InvalidCall(f"manager_type: {kind!s} is not supported; known: {known}")
        return cls._types[str(kind)](config)

    @classmethod
    def get_registered_types(cls) -> list[str]:
        """Return the names of the types."""
        return [str(kind) for kind in cls._types]
