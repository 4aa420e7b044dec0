"""The Celery app, its settings with the reason for each, and the one way to tell Redis of jobs."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import kombu
import redis
from celery import Celery
from kombu import Exchange, Queue
from kombu.exceptions import KombuError, OperationalError
from kombu.pools import producers
from redis.backoff import NoBackoff
from redis.retry import Retry

from schemas.settings import settings
from schemas.verdict import Priority

RUN = "evalpool.run"
"""The name of the only task. It carries job ids and nothing else."""
QUEUES = {priority: f"evalpool.{priority.value}" for priority in Priority}
"""One named queue per priority: Redis' own priorities would hide the backlog from every tool that looks at it."""
UNREACHABLE = (OperationalError, KombuError, redis.RedisError, OSError)
"""What a Redis that cannot be reached looks like, through kombu or past it."""

app = Celery("evalpool", include=["worker.tasks", "worker.letters"])
app.conf.update(
    broker_url=settings().broker_url,
    result_backend=None,  # the ledger is the result store
    task_ignore_result=True,
    task_acks_late=True,  # a killed worker must not take its messages along
    task_acks_on_failure_or_timeout=True,  # the ledger retries, not the queue: no poison message circles
    worker_prefetch_multiplier=1,  # hoarded messages would wait here while another worker is idle
    worker_pool="threads",  # the sandboxes do the work; threads only wait for them
    worker_concurrency=settings().slots + 1,  # one chunk more than slots: the next is leased while these run
    worker_cancel_long_running_tasks_on_connection_loss=False,  # finishing is safe: results are upserts
    broker_connection_retry_on_startup=True,  # wait for Redis for ever, at the start and later
    broker_connection_max_retries=None,
    broker_pool_limit=settings().slots + 3,
    broker_transport_options={
        # A message not acknowledged for this long is delivered again: so comes back what a dead worker had fetched but
        # not begun. That a living one may still be at it does no harm: its jobs are leased, and it costs one query.
        "visibility_timeout": settings().visibility_seconds,
        "unacked_restore_interval": min(
            5, settings().visibility_seconds / 3
        ),  # with the next two: a dead worker's messages return in seconds, not minutes
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": max(2, min(30, int(settings().visibility_seconds))),
        "socket_timeout": settings().redis_timeout,  # a half-open connection must surface
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": max(1, min(10, settings().redis_timeout / 3)),
        "priority_steps": [0],  # one Redis list per queue
        "queue_order_strategy": "priority",  # the queues are read in the order given below
    },
    task_serializer="json",  # with pickle, whoever writes to Redis could run code in a worker
    accept_content=["json"],
    task_queues=[Queue(name, Exchange("evalpool"), routing_key=name) for name in QUEUES.values()],
    task_default_queue=QUEUES[Priority.NORMAL],
    task_create_missing_queues=False,  # a misspelt queue fails at once
    worker_send_task_events=False,  # events cost half the throughput, and the ledger knows better
    task_send_sent_event=False,
    worker_hijack_root_logger=False,  # our own logging
    worker_redirect_stdouts=False,
    enable_utc=True,
)


def publish(jobs: Iterable[tuple[str, str]], chunk: int) -> None:
    """Tell Redis of these jobs, given as (id, priority), many ids to a message. Raises one of `UNREACHABLE`."""
    with producers[_connection(settings().broker_url)].acquire(block=True, timeout=10) as producer, producer.batch():
        for priority, group in groupby(jobs, key=lambda job: job[1]):
            ids = [job_id for job_id, _ in group]
            for start in range(0, len(ids), chunk):
                part = ids[start : start + chunk]
                app.send_task(
                    RUN,
                    args=(part,),
                    argsrepr=f"{len(part)} jobs from {part[0]}",  # what monitors show; Celery's own would take longer
                    queue=QUEUES[Priority(priority)],
                    producer=producer,
                    retry=False,  # the rows are safe; the reconciler is our retry
                )


def chunk_size(jobs: int, slots: int, most: int) -> int:
    """Ids per message: small batches stay parallel, big ones amortise the message."""
    return max(1, min(most, -(-jobs // (slots * 20))))


def backlog(client: "redis.Redis") -> int:
    """Messages that wait in our queues or are in the hands of a worker."""
    pipe: Any = client.pipeline(transaction=False)
    for name in QUEUES.values():
        pipe.llen(name)
    pipe.hlen("unacked")
    return sum(pipe.execute())


def redis_client(url: str) -> "redis.Redis":
    """A client for what Celery does not do: looking at queues, ringing bells."""
    return redis.Redis.from_url(
        url,
        socket_timeout=min(10, settings().redis_timeout),
        socket_connect_timeout=5,
        **({} if url.startswith("unix:") else {"socket_keepalive": True}),
        health_check_interval=15,
        retry=Retry(NoBackoff(), 1),  # once, for a connection that went stale; no waiting: others wait behind us
    )


_connections: dict[str, kombu.Connection] = {}


def _connection(url: str) -> kombu.Connection:
    """One connection object for each Redis, since the producer pools are keyed by it."""
    if url not in _connections:
        _connections[url] = app.connection_for_write(url)
    return _connections[url]
