"""What one cell of a notebook did."""

from typing import Any

from schemas.sandbox import ExecutionStatus
from worker.sandbox.base import STDERR, STDOUT


class Cell:
    """What one cell did."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._texts = {STDOUT: bytearray(), STDERR: bytearray()}
        self.truncated = False
        self.displays: list[dict[str, str]] = []
        self.value: dict[str, str] | None = None
        self.trouble: dict[str, str] | None = None
        self.status = ExecutionStatus.SUCCESS
        self.note = ""
        self.state = "kept"
        """Whether what earlier cells defined is still there."""

    def write(self, stream: int, data: bytes) -> bool:
        """More output; whether it is too much by now."""
        room = self.cap - len(self._texts[stream])
        self._texts[stream] += data[:room]
        self.truncated = self.truncated or len(data) > room
        return self.truncated

    @property
    def stdout(self) -> str:
        """What it printed."""
        return self._texts[STDOUT].decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """What it wrote to standard error."""
        return self._texts[STDERR].decode("utf-8", "replace")

    @property
    def complaint(self) -> str | None:
        """Everything that is to be said of its failure; or what it wrote to standard error."""
        trace = str((self.trouble or {}).get("traceback", ""))
        return "\n".join(part for part in (self.stderr.rstrip("\n"), trace.rstrip("\n"), self.note) if part) or None

    @property
    def metadata(self) -> dict[str, Any]:
        """What is more than text."""
        return {"state": self.state, "displays": self.displays, "result": self.value, "truncated": self.truncated}
