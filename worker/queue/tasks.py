"""The only task: a wake-up. The ledger decides which jobs are run, by their turns."""

from evalpool.worker.queue.celery import RUN, app
from evalpool.worker.queue.lifecycle import runner

MOST_IDS = 1000


@app.task(name=RUN)
def run(*told: object) -> None:
    """Claim and run jobs until nothing is left for this worker; the message is acknowledged when this returns."""
    if told and not _ids(told):
        runner().bury("not a wake-up", told)
    runner().run()


def _ids(told: tuple[object, ...]) -> bool:
    """Whether this is a message of an older version, which listed the ids of jobs. It is a wake-up like any other."""
    (first, *more) = told
    listed = isinstance(first, list) and len(first) <= MOST_IDS and all(isinstance(each, str) for each in first)
    return listed and not more
