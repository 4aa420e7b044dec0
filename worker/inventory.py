"""The images that this worker's engine has."""

import logging

from evalpool.schemas import fleet, images
from evalpool.schemas.errors import SandboxLost, SetupError
from evalpool.worker.sandbox.engine import Engine

log = logging.getLogger("evalpool.inventory")

MOST_ABSENT = 1000
"""How many absent images are remembered. Each of them is part of every claim, and a submitter can name any number."""


class Inventory:
    """Refreshed every few seconds, since images are added, removed and retagged while a worker runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.names: dict[str, str] = {}
        """Name → digest."""
        self.digests: frozenset[str] = frozenset()
        """The digests of all images, including images without a name."""
        self.absent: set[str] = set()
        """Images that jobs need and that are not here. Jobs with these images are left to other workers."""

    async def refresh(self) -> None:
        """List the images again. If the engine does not answer, the last list stays."""
        try:
            self.names, self.digests = await self._engine.call(self._engine.images)
        except (SandboxLost, SetupError) as error:
            log.warning("the images could not be listed: %s", error, extra={"action": "inventory_failed"})
            return
        self.absent = {image for image in self.absent if not self.has(image)}

    def resolve(self, name: str) -> str | None:
        """The digest of the image that has this name here now."""
        return fleet.resolve(name, self.names)

    def pin(self, name: str) -> str:
        """This name with the digest that it has here now."""
        return images.pinned(name, self.resolve(name))

    def has(self, image: str) -> bool:
        """Whether jobs with this image can be run here."""
        digest = images.digest_of(image)
        return digest in self.digests if digest else self.resolve(image) is not None

    def miss(self, image: str) -> bool:
        """Take no more jobs with this image until it is here. Returns False if too many are remembered already."""
        if image not in self.absent and len(self.absent) < MOST_ABSENT:
            self.absent.add(image)
            log.warning(
                "the image %s is not on this machine: its jobs are left to other workers", images.say(image),
                extra={"action": "image_absent"},
            )  # fmt: skip
        return image in self.absent
