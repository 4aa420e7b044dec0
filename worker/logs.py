"""Log lines: each has a sentence, a stable action and ids, as text for people or as JSON for machines."""

import json
import logging
import sys

from evalpool.schemas.terminal import plain

FIELDS = ("action", "job", "batch", "attempt", "sandbox", "verdict")


def set_up(form: str, level: int) -> None:
    """Write all logs of this process to standard error, as `json` or as text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else Text())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chunky in ("celery.app.trace", "celery.worker.strategy"):
        logging.getLogger(chunky).setLevel(logging.WARNING)  # they log two lines per message


class Text(logging.Formatter):
    """`12:00:01 INFO evalpool.runner: the sentence (action=… job=…)`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        ids = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        # Indented, so that output of a program cannot pass for a line of the log.
        line = plain(super().formatMessage(record)).replace("\n", "\n  ")
        return line + (f" ({ids})" if ids else "")


class Json(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
