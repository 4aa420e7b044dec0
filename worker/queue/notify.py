"""The bell: a notification that results are committed. It only saves time, since a caller that misses it polls the
rows."""

import json
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby

import redis

from evalpool.schemas.rows import batch_of
from evalpool.worker.queue.publish import redis_client

MESSAGE = 1 << 20
"""Larger messages, in bytes, are ignored: a worker rings for a few hundred ids at a time."""
ORIGIN = slice(12, 16)
"""The characters of a batch id that name the process that submitted it; see `api.jobs`."""


def channel(batch_id: str) -> str:
    """Return the name of the Redis channel for a batch. All batches of one process share a channel, so that it
    subscribes once, and not for each job."""
    return f"evalpool.done.{batch_id[ORIGIN]}"


class Bell:
    """Notifies callers of the ids of jobs whose results were just committed."""

    def __init__(self, url: str) -> None:
        self.client = redis_client(url)

    def ring(self, job_ids: Iterable[str]) -> None:
        """Notify the callers that these jobs have results. Does nothing if Redis is away."""
        rung = sorted((channel(each), each) for each in job_ids)
        with suppress(redis.RedisError):
            pipe = self.client.pipeline(transaction=False)
            for name, pairs in groupby(rung, key=lambda pair: pair[0]):
                pipe.publish(name, json.dumps([job_id for _, job_id in pairs]))
            pipe.execute()

    def subscription(self) -> "redis.client.PubSub":
        """Return a new connection that can subscribe to channels; its caller closes it."""
        return self.client.pubsub()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


def ids_in(data: object, heard_on: str) -> list[str] | None:
    """Return the ids in a message on this channel, or `None` if it is not one of ours, as any client of Redis can
    publish anything."""
    if not isinstance(data, bytes) or len(data) > MESSAGE:
        return None
    try:
        ids = json.loads(data)
    except (ValueError, RecursionError):
        return None
    ours = isinstance(ids, list) and all(isinstance(each, str) and each.isascii() for each in ids)
    return ids if ours and all(channel(batch_of(each)) == heard_on for each in ids) else None
