"""How workers are woken, and how our own Redis clients are connected."""

import json
from base64 import b64encode
from typing import Any
from uuid import uuid4

import redis
from celery.utils.nodenames import anon_nodename
from kombu.exceptions import KombuError, OperationalError
from redis.backoff import NoBackoff
from redis.retry import Retry

from evalpool.schemas.settings import settings
from evalpool.schemas.verdict import Priority
from evalpool.worker.queue.celery import QUEUES, RUN, app

UNREACHABLE = (OperationalError, KombuError, redis.RedisError, OSError)
"""The exceptions of a Redis that cannot be reached, through kombu or without it."""
UNLESS_WAITING = "if redis.call('llen', KEYS[1]) == 0 then redis.call('lpush', KEYS[1], ARGV[1]) end"
"""A script for Redis: put a message into a queue if the queue is empty."""
ORIGIN = anon_nodename()
"""What monitors show as the sender of a message."""


def wake(client: "redis.Redis", what: str, priority: Priority = Priority.NORMAL) -> None:
    """Make sure that a worker looks for jobs soon. Monitors show `what`. Raises one of `UNREACHABLE`.

    A message only says that there are jobs, and the worker that receives it claims until nothing is left for it. So no
    message is sent while another one waits in the queue.
    """
    client.eval(UNLESS_WAITING, 1, QUEUES[priority], message(what, QUEUES[priority]))


def message(what: str, queue: str) -> str:
    """Return a wake-up as kombu puts it into a Redis list. kombu itself would take two milliseconds of CPU time to send
    it, as much as all of the submission."""
    task = app.amqp.as_task_v2(str(uuid4()), RUN, argsrepr=f"({what!r})", origin=ORIGIN)
    properties = {
        "correlation_id": task.properties["correlation_id"],
        "reply_to": "",  # nobody waits for a reply
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": queue},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": str(uuid4()),
    }
    return json.dumps(
        {
            "body": b64encode(json.dumps(task.body).encode()).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": task.headers,
            "properties": properties,
        }
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
