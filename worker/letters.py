"""Messages that nobody could read: of another version, not ours, or damaged. They end no worker, and have a table
of their own, for whoever wants to know what was in the queue. No job is lost with one: the ledger has them all."""

from json import JSONDecodeError
from typing import Any
from uuid import uuid4

from celery import bootsteps, signals
from kombu.transport import redis as transport

from worker.celery import app
from worker.lifecycle import runner


@signals.task_unknown.connect
@signals.task_rejected.connect
def _refused(message: Any, exc: BaseException | None = None, **_: Any) -> None:
    runner().bury(str(exc or "not a task"), message.body)


@signals.task_failure.connect
def _failed(exception: BaseException, args: Any, kwargs: Any, **_: Any) -> None:
    runner().bury(repr(exception), {"args": args, "kwargs": kwargs})


@app.steps["consumer"].add
class _Undecodable(bootsteps.StartStopStep):  # type: ignore[misc]
    """Celery has no signal for a message whose body cannot be decoded."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def start(self, consumer: Any) -> None:
        log_and_acknowledge = type(consumer).on_decode_error

        def on_decode_error(message: Any, exc: Exception) -> None:
            log_and_acknowledge(consumer, message, exc)
            runner().bury(str(exc), message.body)

        consumer.on_decode_error = on_decode_error


class _Message(transport.Channel.Message):  # type: ignore[misc]
    """Celery ends over a message without an envelope. Given one, it is merely none of its tasks."""

    def __init__(self, payload: Any, channel: Any = None, **kwargs: Any) -> None:
        try:
            super().__init__(payload, channel=channel, **kwargs)
        except (AttributeError, KeyError, TypeError, ValueError):
            way = {"exchange": "", "routing_key": ""}
            envelope = {"delivery_tag": str(uuid4()), "delivery_info": way}
            super().__init__({"body": None, "headers": {}, "properties": envelope}, channel=channel, **kwargs)
            self.body = ascii(payload)


class _Channel(transport.Channel):  # type: ignore[misc]
    Message = _Message

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (JSONDecodeError, UnicodeDecodeError) as error:
            runner().bury("not a message", error.doc if isinstance(error, JSONDecodeError) else error.object)
            return True


transport.Transport.Channel = _Channel
