"""The Celery app, its settings with the reason for each, and the one way to wake workers."""

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
"""The name of the only task. It has no arguments, since the ledger decides which jobs are run."""
QUEUES = {priority: f"evalpool.{priority.value}" for priority in Priority}
"""One named queue per priority: Redis' own priorities would hide the backlog from every tool that looks at it."""
UNREACHABLE = (OperationalError, KombuError, redis.RedisError, OSError)
"""What a Redis that cannot be reached looks like, through kombu or past it."""

app = Celery("evalpool", amqp="worker.transport:AMQP", include=["worker.tasks", "worker.letters"])
app.conf.update(
    broker_url=settings().broker_url,
    result_backend=None,  # the ledger is the result store
    task_ignore_result=True,
    task_acks_late=True,  # a busy worker holds no more messages than it has threads, as others may be free
    task_acks_on_failure_or_timeout=True,  # the ledger retries, not the queue: no poison message circles
    worker_prefetch_multiplier=1,  # hoarded messages would wait here while another worker is idle
    worker_pool="threads",  # the sandboxes do the work; threads only wait for them
    worker_concurrency=settings().slots + 1,  # one more than slots: the next jobs are claimed while these run
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


def wake(client: "redis.Redis", what: str, priority: Priority = Priority.NORMAL) -> None:
    """Make sure that a worker looks for jobs soon. Monitors show `what`. Raises one of `UNREACHABLE`.

    A message only says that there are jobs, and the worker that receives it claims until nothing is left for it. So no
    message is sent while another one waits in the queue.
    """
    queue = QUEUES[priority]
    if client.llen(queue):
        return
    with producers[_connection(settings().broker_url)].acquire(block=True, timeout=10) as producer:
        app.send_task(
            RUN,
            argsrepr=f"({what!r})",  # what monitors show
            queue=queue,
            producer=producer,
            retry=False,  # the rows are safe, and workers poll them every few seconds anyway
        )


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
