"""How workers are woken, and how our own Redis clients are connected."""

from typing import Any

import kombu
import redis
from kombu.exceptions import KombuError, OperationalError
from kombu.pools import producers
from redis.backoff import NoBackoff
from redis.retry import Retry

from evalpool.schemas.settings import settings
from evalpool.schemas.verdict import Priority
from evalpool.worker.queue.celery import QUEUES, RUN, app

UNREACHABLE = (OperationalError, KombuError, redis.RedisError, OSError)
"""The exceptions of a Redis that cannot be reached, through kombu or without it."""


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
    """Return a client for what Celery does not do: reading the length of queues and publishing notifications."""
    # One retry, for a connection that went stale; without a pause, since other messages wait.
    return redis.Redis.from_url(url, **redis_options(url), retry=Retry(NoBackoff(), 1))


def redis_options(url: str) -> dict[str, Any]:
    """Return the connection options of all our clients."""
    return {
        "socket_timeout": min(10, settings().redis_timeout),
        "socket_connect_timeout": 5,
        **({} if url.startswith("unix:") else {"socket_keepalive": True}),
        "health_check_interval": 15,
    }


_connections: dict[str, kombu.Connection] = {}


def _connection(url: str) -> kombu.Connection:
    """Return one connection object for each Redis, since the producer pools are keyed by it."""
    if url not in _connections:
        _connections[url] = app.connection_for_write(url)
    return _connections[url]
