"""Explains why the jobs of a batch wait."""

from api.connections import fleet, store
from schemas import images


def reasons(batch_id: str) -> list[str]:
    """A sentence for each reason why no live worker can run some jobs. The list is empty if all jobs just wait for
    their turn."""
    found, workers = [], fleet()
    for image, unread, count in store().waiting(batch_id):
        jobs = "1 job waits" if count == 1 else f"{count:,} jobs wait"
        if unread:
            found.append(f"{jobs} for a worker with a newer version of evalpool: the running ones cannot read them")
        elif image and workers.members and not workers.has(image):
            found.append(f"{jobs} for the image {images.say(image)}, which no worker has{_moved(image)}")
    if not workers.members and not store().progress(batch_id).complete:
        found.append("no worker is running")
    return found


def _moved(image: str) -> str:
    """A remark if the name refers to another image by now."""
    name = images.name_of(image)
    now = fleet().pin(name)
    return f"; {name} now refers to another image ({str(images.digest_of(now))[:19]}…)" if now != name else ""
