"""How our Celery app reads from Redis: like kombu, except that an undecodable message does not stop the worker.

Celery takes the class of its connections from `app.amqp`, so only our app uses ours. The connection then replaces the
transport. Two simpler ways do not work. The setting `broker_transport` is overridden by a URL with a `+` in it and by
the second of several URLs. A URL scheme of our own is unknown to Flower. In both cases `rediss` would lose its TLS, as
kombu turns TLS on by the name of the transport.
"""

from typing import Any
from uuid import uuid4

import kombu
from celery.app import amqp
from celery.utils.dispatch import Signal
from kombu.transport import redis
from redis.exceptions import ConnectionError as Disconnected

unreadable = Signal(name="unreadable", providing_args={"reason", "body"})
"""Sent when a message was taken from a queue and cannot be decoded. The queue does not have it any more."""
UNDECODABLE = (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What kombu raises for a message that is not JSON, is nested too deeply, or has an invalid number or date in it."""


class Message(redis.Channel.Message):  # type: ignore[misc]
    """Celery stops at a message without an envelope. Here it gets one, and Celery refuses it like any unknown task."""

    def __init__(self, payload: Any, channel: Any = None, **kwargs: Any) -> None:
        try:
            super().__init__(payload, channel=channel, **kwargs)
        except (AttributeError, KeyError, TypeError, ValueError):
            way = {"exchange": "", "routing_key": ""}
            envelope = {"delivery_tag": str(uuid4()), "delivery_info": way}
            super().__init__({"body": None, "headers": {}, "properties": envelope}, channel=channel, **kwargs)
            self.body = ascii(payload)


class Channel(redis.Channel):  # type: ignore[misc]
    """Continues after a message that cannot be decoded."""

    Message = Message

    def _connparams(self, asynchronous: bool = False) -> Any:
        # When Redis is lost, Celery closes the connection, and kombu requeues what was not acknowledged through a
        # connection that it has let go of. Celery ignores a lost connection there, but ends over an AttributeError.
        if self.connection.client is None:
            raise Disconnected("the connection to Redis was closed meanwhile")
        return super()._connparams(asynchronous=asynchronous)

    def _brpop_read(self, **options: Any) -> Any:
        self.connection.decoded = False
        try:
            return super()._brpop_read(**options)
        except UNDECODABLE as error:
            if self.connection.decoded:
                raise
            unreadable.send(sender=self, reason=f"not a message: {error}", body=getattr(error, "doc", ""))
            return True  # as after any message, so that kombu asks for the next one


class Transport(redis.Transport):  # type: ignore[misc]
    """Redis, read by our channel."""

    Channel = Channel
    decoded = False
    """Whether the last message was decoded. If so, a later exception is not the message's fault."""

    def _deliver(self, message: Any, queue: str) -> None:
        self.decoded = True
        super()._deliver(message, queue)


class Connection(kombu.Connection):  # type: ignore[misc]
    """Uses our transport wherever kombu would use its own for Redis."""

    def get_transport_cls(self) -> Any:
        usual = super().get_transport_cls()
        return Transport if usual is redis.Transport else usual


class AMQP(amqp.AMQP):  # type: ignore[misc]
    """Celery takes the class of its connections from here. The connections in its pools stay kombu's; they only read
    replies."""

    Connection = Connection
