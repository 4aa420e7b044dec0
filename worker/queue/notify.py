"""The bell: a notification that results are committed. It only saves time, since a caller that misses it polls the
rows."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby

import redis

from evalpool.schemas.rows import batch_of
from evalpool.worker.queue.publish import redis_client

MESSAGE = 1 << 20
"""Larger messages, in bytes, are ignored: a worker rings for a few hundred ids at a time."""


def channel(batch_id: str) -> str:
    """Return the name of the Redis channel for a batch."""
    return f"evalpool.done.{batch_id}"


class Bell:
    """Notifies callers of the ids of jobs whose results were just committed."""

    def __init__(self, url: str) -> None:
        self.client = redis_client(url)

    def ring(self, job_ids: Iterable[str]) -> None:
        """Notify the callers that these jobs have results. Does nothing if Redis is away."""
        with suppress(redis.RedisError):
            pipe = self.client.pipeline(transaction=False)
            for batch_id, ids in groupby(sorted(job_ids), key=batch_of):
                pipe.publish(channel(batch_id), json.dumps(list(ids)))
            pipe.execute()

    @contextmanager
    def listen(self, batch_id: str) -> Iterator["Listener"]:
        """Subscribe to one batch. Read the rows after entering, since there is no notification of earlier commits."""
        pubsub = self.client.pubsub(ignore_subscribe_messages=True)
        with suppress(redis.RedisError):
            pubsub.subscribe(channel(batch_id))
            pubsub.get_message(timeout=5)  # the confirmation; from now on nothing is missed
        try:
            yield Listener(pubsub, batch_id)
        finally:
            with suppress(redis.RedisError):
                pubsub.close()

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


class Listener:
    """A subscription to the results of one batch."""

    def __init__(self, pubsub: "redis.client.PubSub", batch_id: str) -> None:
        self._pubsub, self._batch_id = pubsub, batch_id

    def wait(self, seconds: float) -> list[str] | None:
        """Return the ids in the next message. `None` means that the caller should read the rows: no message came in
        time, Redis failed, or the message was not from a worker."""
        try:
            message = self._pubsub.get_message(timeout=seconds)
        except (redis.RedisError, OSError, RuntimeError):
            time.sleep(min(seconds, 0.25))  # no busy loop while Redis is away
            return None
        return None if message is None else ids_in(message["data"], self._batch_id)


def ids_in(data: object, batch_id: str) -> list[str] | None:
    """Return the ids in a message, or `None` if it is not one of ours, as any client of Redis can publish anything."""
    if not isinstance(data, bytes) or len(data) > MESSAGE:
        return None
    try:
        ids = json.loads(data)
    except (ValueError, RecursionError):
        return None
    ours = isinstance(ids, list) and all(isinstance(each, str) and each.isascii() for each in ids)
    return ids if ours and all(batch_of(each) == batch_id for each in ids) else None
