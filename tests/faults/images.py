"""A name of an image that comes to mean another one."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import docker
from docker.errors import ImageNotFound


@dataclass(frozen=True)
class Tag:
    """The name, and the two images that it may mean."""

    client: docker.DockerClient
    name: str
    images: tuple[str, str]

    def move(self, which: int) -> None:
        """From now on it means this one."""
        repository, _, tag = self.name.partition(":")
        self.client.api.tag(self.images[which], repository, tag, force=True)


@contextmanager
def moving_tag(client: docker.DockerClient, image: str) -> Iterator[Tag]:
    """A tag of our own that means the first of two copies of an image. Neither copy has another name."""
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
