"""Explains why the jobs of a batch wait."""

from evalpool.api.connections import store
from evalpool.schemas import images
from evalpool.schemas.fleet import Fleet
from evalpool.schemas.settings import settings


def reasons(batch_id: str, unseen: float = 0) -> list[str]:
    """Return a sentence for each reason why no live worker can run some jobs. The list is empty if all jobs just wait
    for their turn. The caller has seen no worker for `unseen` seconds."""
    found: list[str] = []
    alive = store().members(settings().lease_seconds)
    for fleet, image, unread, count in store().waiting(batch_id):
        workers = Fleet(members=tuple(each for each in alive if each.fleet == fleet))
        jobs = "1 job waits" if count == 1 else f"{count:,} jobs wait"
        if unread:
            found.append(f"{jobs} for a worker with a newer version of evalpool: the running ones cannot read them")
        elif not workers.members and fleet not in ("", settings().fleet):
            them = "it" if count == 1 else "them"
            found.append(
                f"{jobs} for the `evalpool run` that submitted {them}, which has ended: run it again to resume"
            )
        elif not workers.members:
            found.append(_lonely(unseen))
        elif image and not workers.has(image):
            found.append(f"{jobs} for the image {images.say(image)}, which no worker has{_remedy(image, workers)}")
    if not alive and not found and not store().progress(batch_id).complete:
        found.append(_lonely(unseen))
    return list(dict.fromkeys(found))


def _lonely(unseen: float) -> str:
    unseen = max(unseen, store().last_seen() or 0)
    since = f"no worker has been seen for {unseen:.0f} s (`evalpool worker` starts one)"
    return since if unseen >= 1 else "no worker is running"


def _remedy(image: str, workers: Fleet) -> str:
    """Say to which image the name refers now, if it is another one, or how to get it."""
    name = images.name_of(image)
    found = workers.pin(name)
    if found != name:
        return f"; {name} now refers to another image ({str(images.digest_of(found))[:19]}…)"
    return f"; {images.remedy(name, settings())}"
