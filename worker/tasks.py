"""The only task. Its ids say what was announced; which jobs are run is for the ledger to say, by their turns."""

from worker.celery import RUN, app
from worker.lifecycle import runner

MOST_IDS = 1000


@app.task(name=RUN)
def run(job_ids: object) -> None:
    """Lease, evaluate, record; the message is acknowledged when this returns."""
    if not isinstance(job_ids, list) or len(job_ids) > MOST_IDS or not all(isinstance(each, str) for each in job_ids):
        runner().bury("not a list of job ids", job_ids)
        return
    runner().run(len(job_ids))
