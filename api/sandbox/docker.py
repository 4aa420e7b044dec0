"""The Docker types of sandbox."""

import logging
import re
import threading
from dataclasses import replace

from evalpool.api.sandbox import volumes
from evalpool.api.sandbox.box import BoxSandbox
from evalpool.api.sandbox.factory import register_sandbox
from evalpool.schemas import images
from evalpool.schemas.errors import SandboxLost
from evalpool.schemas.sandbox import DockerSandboxConfig, SandboxType
from evalpool.schemas.settings import settings
from evalpool.worker.sandbox.base import Box
from evalpool.worker.sandbox.engine import Engine
from evalpool.worker.sandbox.factory import Containers

log = logging.getLogger("evalpool.sandbox")


class Engines:
    """Shares one connection to Docker among all sandboxes of a process. The last sandbox closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._engine: Engine | None = None
        self.swept = False

    def take(self) -> Engine:
        """Return the connection, for one more sandbox."""
        with self._lock:
            self._users += 1
            if self._engine is None:
                self._engine = Engine(settings().docker_timeout)
            return self._engine

    def give_back(self) -> None:
        """Note that one sandbox no longer needs the connection."""
        with self._lock:
            self._users -= 1
            if not self._users and self._engine is not None:
                engine, self._engine = self._engine, None
                threading.Thread(target=engine.close).start()


engines = Engines()

_PYTHON = re.compile(r"(docker\.io/)?(library/)?python:3(\.11(\.\d+)?)?(-slim)?(-bookworm)?")


@register_sandbox(SandboxType.DOCKER)
class DockerSandbox(BoxSandbox):
    """A hardened container with evalpool's agent in it."""

    config: DockerSandboxConfig
    keeps_tmp = True
    _engine: Engine | None = None

    @property
    def sandbox_type(self) -> str:
        return SandboxType.DOCKER

    def _own_image(self) -> str:
        """Return the image of the settings that suits the tools of this sandbox."""
        notebook = self.sandbox_type == SandboxType.DOCKER_NOTEBOOK
        return images.suited(["notebook_executor"] if notebook else self.config.tools_config, settings())

    async def _make(self) -> Box:
        self._engine = engine = engines.take()
        if not engines.swept:
            engines.swept = True
            await engine.call(engine.sweep)  # remove containers of processes that were killed while they made one
        asked, own = self.config.image, self._own_image()
        image = asked or own
        if asked is not None and not await engine.call(engine.has, asked):
            stands_for = _PYTHON.fullmatch(asked) or asked.startswith(("jupyter-kernel-gateway", "volcengine/sandbox-"))
            if stands_for:
                log.warning("sandbox %s: the image %s is not on this machine; %s is used instead", self.id, asked, own)
                image = own
        self.config = self.config.model_copy(update={"image": image})
        return await Containers(engine, settings()).start(replace(self.shape, image=image))

    async def _prepare(self) -> None:
        await volumes.copy_in(self, self.config.volumes)

    async def _stop(self) -> None:
        problem: Exception | None = None
        if self.status.active and self.config.volumes:
            try:
                await self.end_commands()
                await volumes.copy_out(self, self.config.volumes)
            except Exception as error:  # the container must be removed all the same
                problem = error
        await super()._stop()
        if problem is not None:
            self.fail(f"volumes were not copied back: {problem}")
            raise SandboxLost(self.metadata["error"]) from problem

    async def cleanup(self) -> None:
        try:
            await super().cleanup()
        finally:
            engine, self._engine = self._engine, None
            if engine is not None:
                engines.give_back()


@register_sandbox(SandboxType.DOCKER_NOTEBOOK)
class NotebookSandbox(DockerSandbox):
    """A hardened container with an image for notebooks."""

    other_types = (SandboxType.DOCKER,)

    @property
    def sandbox_type(self) -> str:
        return SandboxType.DOCKER_NOTEBOOK
