"""Which class of sandbox serves a shape: a container with our agent, or without it where the image has no Python."""

import logging

from evalpool.schemas.errors import CannotImport, NoAgent, SandboxLost, SetupError
from evalpool.schemas.images import name_of
from evalpool.schemas.settings import Settings
from evalpool.worker.sandbox.base import Box, Shape
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.sandbox.engine import Engine
from evalpool.worker.sandbox.exec import ExecBox

log = logging.getLogger("evalpool.sandbox")

TRIES = 2
"""How often a sandbox with imports must not come up until it is started without them."""


class Containers:
    """Starts sandboxes that are containers of one engine."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._without_agent: set[str] = set()
        """Images in which the agent could not be started, as they have no Python."""
        self._unable: dict[str, set[str]] = {}
        """Image → the modules that cannot be imported there in advance."""

    async def start(self, shape: Shape) -> Box:
        """Return a started sandbox of this shape. Raises `SetupError` if a session is to run in an image without
        Python: only the agent can keep one."""
        if shape.image not in self._without_agent:
            try:
                return await self._with_agent(shape)
            except NoAgent as error:
                if shape.commands:
                    raise SetupError(f"image: {name_of(shape.image)} has no python3, which a session needs") from error
                if shape.image not in self._without_agent:
                    log.warning(
                        "the image %s has no Python for the agent: its programs run through `docker exec`, which is "
                        "slower (%s)", shape.image, error, extra={"action": "no_agent"},
                    )  # fmt: skip
                self._without_agent.add(shape.image)
        fallback = ExecBox(shape, self._engine, self._settings.runtime)
        await fallback.start()
        return fallback

    async def _with_agent(self, shape: Shape) -> Box:
        """Start a sandbox with our agent. Modules that the image lacks are not imported in advance, and not tried
        again: a failed import may leave anything behind, so it costs a container."""
        unable, lost = self._unable.setdefault(shape.image, set()), 0
        while True:
            sandbox = DockerBox(shape, self._engine, settings=self._settings, without=tuple(unable))
            try:
                await sandbox.start()
                return sandbox
            except CannotImport as error:
                if error.module not in (*self._settings.preload, *shape.preload, *unable):
                    raise  # one of the standard library
                if error.module not in unable:
                    log.warning(
                        "%s cannot be imported in the image %s %s: it is not imported in advance there",
                        error.module, name_of(shape.image), error.reason, extra={"action": "cannot_import"},
                    )  # fmt: skip
                unable.add(error.module)
            except NoAgent:
                raise
            except SandboxLost as error:
                if not sandbox.id or unable.issuperset(shape.preload):
                    raise
                lost += 1
                if lost < TRIES:  # this may have had any other reason
                    continue
                # The agent does not come up. Perhaps an import hangs or takes all memory: jobs can do without it.
                log.warning(
                    "%s will not be imported in advance in the image %s: the sandbox did not start (%s)",
                    ", ".join(shape.preload), name_of(shape.image), error, extra={"action": "cannot_import"},
                )  # fmt: skip
                unable.update(shape.preload)
