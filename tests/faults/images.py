"""An image tag that can be moved to another image."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import docker
from docker.errors import ImageNotFound


@dataclass(frozen=True)
class Tag:
    """The tag, and the two images that it can be moved to."""

    client: docker.DockerClient
    name: str
    images: tuple[str, str]

    def move(self, which: int) -> None:
        """Move the tag to this image."""
        repository, _, tag = self.name.partition(":")
        self.client.api.tag(self.images[which], repository, tag, force=True)


@contextmanager
def moving_tag(client: docker.DockerClient, image: str) -> Iterator[Tag]:
    """A tag of our own on the first of two copies of an image. The copies have no other tag."""
    made: list[str] = []
    for _ in range(2):
        box = client.api.create_container(image, command=["true"], entrypoint=[])["Id"]
        made.append(client.api.commit(box, message=secrets.token_hex(8))["Id"])
        client.api.remove_container(box, force=True)
    tag = Tag(client, f"evalpool-test/moved-{secrets.token_hex(4)}:1", (made[0], made[1]))
    tag.move(0)
    try:
        yield tag
    finally:
        for each in (tag.name, *made):
            with suppress(ImageNotFound):
                client.api.remove_image(each, force=True)
