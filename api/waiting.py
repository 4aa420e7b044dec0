"""Why the jobs of a batch wait, for people who wonder that nothing happens."""

from api.connections import fleet, store
from schemas import images


def reasons(batch_id: str) -> list[str]:
    """A sentence for each thing that keeps waiting jobs from being run by the workers there are; none if they merely
    wait for their turn."""
    found, workers = [], fleet()
    for image, unread, count in store().waiting(batch_id):
        jobs = "1 job waits" if count == 1 else f"{count:,} jobs wait"
        if unread:
            found.append(f"{jobs} for a worker of a newer version of evalpool: those there are cannot read them")
        elif image and workers.members and not workers.has(image):
            found.append(f"{jobs} for the image {images.say(image)}, which no worker has{_moved(image)}")
    if not workers.members and not store().progress(batch_id).complete:
        found.append("no worker is running")
    return found


def _moved(image: str) -> str:
    """The image that has the name now, if it is another one."""
    name = images.name_of(image)
    now = fleet().pin(name)
    return f"; by now, {name} is the name of another image ({str(images.digest_of(now))[:19]}…)" if now != name else ""
