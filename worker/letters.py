"""Messages that nobody could read: of another version, not ours, or damaged. They end no worker, and have a table
of their own, for whoever wants to know what was in the queue. No job is lost with one: the ledger has them all."""

from typing import Any

from celery import bootsteps, signals

from worker.celery import app
from worker.lifecycle import runner
from worker.transport import unreadable


@signals.task_unknown.connect
@signals.task_rejected.connect
def _refused(message: Any, exc: BaseException | None = None, **_: Any) -> None:
    runner().bury(str(exc or "not a task"), message.body)


@signals.task_failure.connect
def _failed(exception: BaseException, args: Any, kwargs: Any, **_: Any) -> None:
    runner().bury(repr(exception), {"args": args, "kwargs": kwargs})


@unreadable.connect
def _no_message(reason: str, body: str | bytes, **_: Any) -> None:
    runner().bury(reason, body)


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
