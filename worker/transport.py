"""How our Celery app reads from Redis: like kombu, except that a message that is none does not end the worker.

Celery takes the class of its connections from its `amqp` part, so ours is used by our app and by nobody else in the
process. The connection exchanges the transport; the setting `broker_transport` or a URL scheme of our own would not do:
a URL with a `+` in it, and the next one of several URLs, override the setting; kombu knows `rediss` by the name of its
transport, and would connect without TLS; and Flower does not know schemes of ours.
"""

from typing import Any
from uuid import uuid4

import kombu
from celery.app import amqp
from celery.utils.dispatch import Signal
from kombu.transport import redis

unreadable = Signal(name="unreadable", providing_args={"reason", "body"})
"""Sent when something was taken from a queue that cannot be decoded. Nobody else has it any more."""
UNDECODABLE = (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What kombu raises at such a thing: it is not JSON, too deep, or has a number or a date in it that is none."""


class Message(redis.Channel.Message):  # type: ignore[misc]
    """Celery ends at a message without an envelope. Here it gets one, and Celery refuses it like any unknown task."""

    def __init__(self, payload: Any, channel: Any = None, **kwargs: Any) -> None:
        try:
            super().__init__(payload, channel=channel, **kwargs)
        except (AttributeError, KeyError, TypeError, ValueError):
            way = {"exchange": "", "routing_key": ""}
            envelope = {"delivery_tag": str(uuid4()), "delivery_info": way}
            super().__init__({"body": None, "headers": {}, "properties": envelope}, channel=channel, **kwargs)
            self.body = ascii(payload)


class Channel(redis.Channel):  # type: ignore[misc]
    """Goes on after a message that cannot be decoded."""

    Message = Message

    def _brpop_read(self, **options: Any) -> Any:
        self.connection.decoded = False
        try:
            return super()._brpop_read(**options)
        except UNDECODABLE as error:
            if self.connection.decoded:
                raise
            unreadable.send(sender=self, reason=f"not a message: {error}", body=getattr(error, "doc", ""))
            return True  # like after any message: kombu asks for the next one


class Transport(redis.Transport):  # type: ignore[misc]
    """Redis, read by our channel."""

    Channel = Channel
    decoded = False
    """Whether what was read last could be decoded: what is raised after that is not the message's fault."""

    def _deliver(self, message: Any, queue: str) -> None:
        self.decoded = True
        super()._deliver(message, queue)


class Connection(kombu.Connection):  # type: ignore[misc]
    """Uses our transport wherever kombu would use its own for Redis."""

    def get_transport_cls(self) -> Any:
        usual = super().get_transport_cls()
        return Transport if usual is redis.Transport else usual


class AMQP(amqp.AMQP):  # type: ignore[misc]
    """What Celery makes connections with. Those in its pools are kombu's own: they write, and read replies only."""

    Connection = Connection
