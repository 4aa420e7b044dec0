"""What a command says, from bytes to lines and a result."""

import logging
from collections.abc import Callable

from schemas.sandbox import CommandResult, ExecutionStatus
from worker.library.sandbox import Heed
from worker.sandbox.base import STDERR, STDOUT, Command, Outcome

log = logging.getLogger("evalpool.sandbox")

NAMES = {STDOUT: "stdout", STDERR: "stderr"}


class Output:
    """What a command says, kept; and its lines, told as they come."""

    def __init__(self, sandbox: str, stream: bool | Heed) -> None:
        self._sandbox, self._stream = sandbox, stream
        self._kept = {STDOUT: bytearray(), STDERR: bytearray()}
        self._told = {STDOUT: 0, STDERR: 0}
        self._problem: Exception | None = None
        self.stop: Callable[[], object] = bool
        """Ends the command."""
        if stream is True and not log.isEnabledFor(logging.DEBUG):
            self._stream = False

    def hear(self, stream: int, data: bytes) -> None:
        """More of it."""
        if stream not in self._kept:
            return
        kept, end = self._kept[stream], data.rfind(b"\n") + 1
        kept += data
        if self._stream is not False and end:
            self._tell(stream, len(kept) - len(data) + end)

    def _tell(self, stream: int, end: int) -> None:
        start, self._told[stream] = self._told[stream], max(end, self._told[stream])
        for line in self._kept[stream][start:end].splitlines():
            text = line.decode("utf-8", "replace")
            if callable(self._stream):
                try:
                    self._stream(NAMES[stream], text)
                except Exception as error:  # the caller's own: it is raised where the caller is
                    self._problem, self._stream = error, False
                    self.stop()
                    return
            else:
                log.debug("%s %s: %s", self._sandbox, NAMES[stream], text)

    def result(self, command: Command, outcome: Outcome, encoding: str) -> CommandResult:
        """All of it."""
        for stream in self._kept if self._stream is not False else ():
            self._tell(stream, len(self._kept[stream]))  # a last line without an end
        if self._problem is not None:
            raise self._problem
        status, code = ExecutionStatus.ERROR, outcome.exit_code
        if code is None:
            code = 128 + (outcome.signal or 0)
        if outcome.ended == "wall":
            status, code = ExecutionStatus.TIMEOUT, 124
        elif outcome.ended == "stopped":
            status = ExecutionStatus.CANCELLED
        elif outcome.ended == "itself" and code == 0:
            status = ExecutionStatus.SUCCESS
        texts = {stream: bytes(kept[: command.output_bytes]) for stream, kept in self._kept.items()}
        stderr = texts[STDERR].decode("utf-8", "replace")
        words = ""
        if outcome.ended == "output":
            words = f"It was stopped: it wrote more than {command.output_bytes:,} bytes."
        elif outcome.oom_kills and outcome.signal == 9:
            words = "It was killed: all memory of the sandbox was used up."
        elif outcome.signal is not None and outcome.ended == "itself" and not stderr:
            words = f"It was ended by signal {outcome.signal}."
        if words:
            stderr = f"{stderr}\n{words}" if stderr else words
        return CommandResult(
            command=list(command.argv),
            status=status,
            exit_code=code,
            stdout=texts[STDOUT].decode(encoding, "replace"),
            stderr=stderr,
            metadata={
                "exit_code": outcome.exit_code,
                "signal": outcome.signal,
                "ended": outcome.ended,
                "oom_killed": outcome.oom_kills > 0,
                "wall_seconds": outcome.wall_seconds,
                "cpu_seconds": outcome.cpu_seconds,
                "peak_memory_bytes": outcome.memory_bytes,
            },
        )
