"""Dead letters: messages that nobody could read, because they are damaged, not ours or of another version. They do not
stop a worker, and are kept in a table of their own. No job is lost with them, since the ledger has all jobs."""

from typing import Any

from celery import bootsteps, signals

from evalpool.worker.queue.celery import app
from evalpool.worker.queue.lifecycle import runner
from evalpool.worker.queue.transport import unreadable


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
