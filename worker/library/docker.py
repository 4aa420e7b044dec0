"""Sandboxes that are containers."""

import logging
import re
import threading
from dataclasses import replace

from schemas.errors import SandboxLost, SetupError
from schemas.sandbox import DockerSandboxConfig, SandboxType
from schemas.settings import settings
from worker.library import volumes
from worker.library.box import BoxSandbox
from worker.library.factory import register_sandbox
from worker.sandbox.base import Sandbox as Box
from worker.sandbox.docker import DockerSandbox as Container
from worker.sandbox.engine import Engine, NoAgent

log = logging.getLogger("evalpool.sandbox")


class Engines:
    """One connection to Docker for all sandboxes of a process, for as long as there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._engine: Engine | None = None
        self.swept = False

    def take(self) -> Engine:
        """For one sandbox."""
        with self._lock:
            self._users += 1
            if self._engine is None:
                self._engine = Engine(settings().docker_timeout)
            return self._engine

    def give_back(self) -> None:
        """By it, when it is gone."""
        with self._lock:
            self._users -= 1
            if not self._users and self._engine is not None:
                engine, self._engine = self._engine, None
                threading.Thread(target=engine.close).start()


engines = Engines()

_PYTHON = re.compile(r"(docker\.io/)?(library/)?python:3(\.11(\.\d+)?)?(-slim)?(-bookworm)?")


@register_sandbox(SandboxType.DOCKER)
class DockerSandbox(BoxSandbox):
    """A hardened container, with evalpool's agent in it."""

    config: DockerSandboxConfig
    keeps_tmp = True
    _engine: Engine | None = None

    @property
    def sandbox_type(self) -> str:
        return SandboxType.DOCKER

    def _own_image(self) -> str:
        """The one of the settings that suits its tools."""
        now, tools = settings(), self.config.tools_config
        if self.sandbox_type == SandboxType.DOCKER_NOTEBOOK:
            return now.notebook_image
        if "multi_code_executor" in tools:  # cells run there, too, if without plots
            return now.code_image
        return now.notebook_image if "notebook_executor" in tools else now.image

    async def _make(self) -> Box:
        self._engine = engine = engines.take()
        if not engines.swept:
            engines.swept = True
            await engine.call(engine.sweep)  # what a process left that was killed while it made one
        asked, own = self.config.image, self._own_image()
        image = asked or own
        if asked is not None and not await engine.call(engine.has, asked):
            stands_for = _PYTHON.fullmatch(asked) or asked.startswith(("jupyter-kernel-gateway", "volcengine/sandbox-"))
            if stands_for:
                log.warning("sandbox %s: there is no image %s here; %s takes its place", self.id, asked, own)
                image = own
        self.config = self.config.model_copy(update={"image": image})
        box = Container(replace(self.shape, image=image), engine, settings=settings())
        try:
            await box.start()
        except NoAgent as error:
            raise SetupError(f"image: {image} has no python3, which a session needs") from error
        return box

    async def _prepare(self) -> None:
        await volumes.copy_in(self, self.config.volumes)

    async def _stop(self) -> None:
        problem: Exception | None = None
        if self.status.active and self.config.volumes:
            try:
                await self.end_commands()
                await volumes.copy_out(self, self.config.volumes)
            except Exception as error:  # whatever it is, the container goes
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
    """The same, with an image that notebooks feel at home in."""

    other_types = (SandboxType.DOCKER,)

    @property
    def sandbox_type(self) -> str:
        return SandboxType.DOCKER_NOTEBOOK
