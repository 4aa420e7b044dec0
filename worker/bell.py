"""The bell that rings when results are committed. It only saves waiting: who misses it finds the rows all the same."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby

import redis

from schemas.rows import batch_of
from worker.celery import redis_client

MESSAGE = 1 << 20
"""Larger messages, in bytes, are ignored: a worker rings for a few hundred ids at a time."""


def _channel(batch_id: str) -> str:
    return f"evalpool.done.{batch_id}"


class Bell:
    """Rings with the ids of jobs whose results were just committed."""

    def __init__(self, url: str) -> None:
        self.client = redis_client(url)

    def ring(self, job_ids: Iterable[str]) -> None:
        """Say that these jobs have results. Silent when Redis is away."""
        with suppress(redis.RedisError):
            pipe = self.client.pipeline(transaction=False)
            for batch_id, ids in groupby(sorted(job_ids), key=batch_of):
                pipe.publish(_channel(batch_id), json.dumps(list(ids)))
            pipe.execute()

    @contextmanager
    def listen(self, batch_id: str) -> Iterator["Listener"]:
        """Hear the bell of one batch. Look at the rows after entering: what was committed before is not rung again."""
        pubsub = self.client.pubsub(ignore_subscribe_messages=True)
        with suppress(redis.RedisError):
            pubsub.subscribe(_channel(batch_id))
            pubsub.get_message(timeout=5)  # the confirmation: from here on nothing is missed
        try:
            yield Listener(pubsub, batch_id)
        finally:
            with suppress(redis.RedisError):
                pubsub.close()

    def close(self) -> None:
        """Let go of the connections."""
        self.client.close()


class Listener:
    """One subscription."""

    def __init__(self, pubsub: "redis.client.PubSub", batch_id: str) -> None:
        self._pubsub, self._batch_id = pubsub, batch_id

    def wait(self, seconds: float) -> list[str] | None:
        """The ids in the next message. `None` means that the caller should read the rows: no message came in time,
        Redis failed, or the message was not from a worker."""
        try:
            message = self._pubsub.get_message(timeout=seconds)
        except (redis.RedisError, OSError, RuntimeError):
            time.sleep(min(seconds, 0.25))  # no busy loop over a broken bell
            return None
        return None if message is None else _ids(message["data"], self._batch_id)


def _ids(data: object, batch_id: str) -> list[str] | None:
    """The ids in a message, or `None` if it is not one of ours: any client of Redis can publish anything."""
    if not isinstance(data, bytes) or len(data) > MESSAGE:
        return None
    try:
        ids = json.loads(data)
    except (ValueError, RecursionError):
        return None
    ours = isinstance(ids, list) and all(isinstance(each, str) and each.isascii() for each in ids)
    return ids if ours and all(batch_of(each) == batch_id for each in ids) else None
