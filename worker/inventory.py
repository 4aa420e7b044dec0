"""The images that this worker's engine has, as of a moment ago."""

import logging

from schemas import fleet, images
from schemas.errors import SandboxLost, SetupError
from worker.sandbox.engine import Engine

log = logging.getLogger("evalpool.inventory")

MOST_ABSENT = 1000
"""Images that are not here and of which that is remembered: each of them is part of every claim, and whoever submits
jobs can name as many as he likes."""


class Inventory:
    """Looked through every few seconds: images come, go and change their names while a worker runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.names: dict[str, str] = {}
        """Name → digest."""
        self.digests: frozenset[str] = frozenset()
        """All digests, those without a name included."""
        self.absent: set[str] = set()
        """Images that jobs have asked for and that are not here: such jobs are left to other workers."""

    async def refresh(self) -> None:
        """Look through them. With the engine away, what was known before stands."""
        try:
            self.names, self.digests = await self._engine.call(self._engine.images)
        except (SandboxLost, SetupError) as error:
            log.warning("the images could not be listed: %s", error, extra={"action": "inventory_failed"})
            return
        self.absent = {image for image in self.absent if not self.has(image)}

    def resolve(self, name: str) -> str | None:
        """The digest that this name has here, now."""
        return fleet.resolve(name, self.names)

    def pin(self, name: str) -> str:
        """The image that this name means here, now."""
        return images.pinned(name, self.resolve(name))

    def has(self, image: str) -> bool:
        """Whether jobs of this image can be run here."""
        digest = images.digest_of(image)
        return digest in self.digests if digest else self.resolve(image) is not None

    def miss(self, image: str) -> bool:
        """Take no more jobs of this image, until it is here; False if that cannot be remembered."""
        if image not in self.absent and len(self.absent) < MOST_ABSENT:
            self.absent.add(image)
            log.warning(
                "the image %s is not on this machine: its jobs are left to other workers", images.say(image),
                extra={"action": "image_absent"},
            )  # fmt: skip
        return image in self.absent
