"""Collects the output of a command: bytes become lines, and in the end a result."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from evalpool.api.sandbox.sandbox import Listener
from evalpool.schemas.sandbox import CommandResult, ExecutionStatus
from evalpool.worker.sandbox.base import STDERR, STDOUT, Command, End, Outcome

log = logging.getLogger("evalpool.sandbox")

NAMES = {STDOUT: "stdout", STDERR: "stderr"}


class Output:
    """Keeps the output of a command, and reports its lines as they come."""

    def __init__(self, sandbox: str, stream: bool | Listener) -> None:
        self._sandbox, self._stream = sandbox, stream
        self._kept = {STDOUT: bytearray(), STDERR: bytearray()}
        self._offset = {STDOUT: 0, STDERR: 0}
        """The number of bytes of each stream whose lines have been reported."""
        self._problem: Exception | None = None
        self.stop: Callable[[], object] = bool
        """Stops the command."""
        if stream is True and not log.isEnabledFor(logging.DEBUG):
            self._stream = False

    def hear(self, stream: int, data: bytes) -> None:
        """Take more bytes of a stream."""
        if stream not in self._kept:
            return
        kept = self._kept[stream]
        start = max(0, len(kept) - 1)
        kept += data
        if self._stream is not False:
            # A carriage return at the very end may be the first half of a line break: the next byte decides.
            self._tell(stream, max(kept.rfind(b"\n", start), kept.rfind(b"\r", start, len(kept) - 1)) + 1)

    def _tell(self, stream: int, end: int) -> None:
        start, self._offset[stream] = self._offset[stream], max(end, self._offset[stream])
        for line in self._kept[stream][start:end].splitlines():
            text = line.decode("utf-8", "replace")
            if callable(self._stream):
                try:
                    self._stream(NAMES[stream], text)
                except Exception as error:  # from the caller's function: raised again where the caller waits
                    self._problem, self._stream = error, False
                    self.stop()
                    return
            else:
                log.debug("%s %s: %s", self._sandbox, NAMES[stream], text)

    def result(self, command: Command, outcome: Outcome, encoding: str) -> CommandResult:
        """Return the result of the command. Raises the error of the caller's function for lines, if there was one."""
        for stream in self._kept if self._stream is not False else ():
            self._tell(stream, len(self._kept[stream]))  # a last line without an end
        if self._problem is not None:
            raise self._problem
        texts = {stream: bytes(kept[: command.output_bytes]) for stream, kept in self._kept.items()}
        stderr = texts[STDERR].decode("utf-8", "replace")
        end = _end(outcome)
        return CommandResult(
            command=list(command.argv),
            status=end.status,
            exit_code=end.exit_code,
            stdout=texts[STDOUT].decode(encoding, "replace"),
            stderr="\n".join(filter(None, (stderr, _reason(command, outcome, silent=not stderr)))),
            metadata={
                "exit_code": outcome.exit_code,
                "signal": outcome.signal,
                "ended": outcome.ended.value,
                "oom_killed": outcome.oom_kills > 0,
                "wall_seconds": outcome.wall_seconds,
                "cpu_seconds": outcome.cpu_seconds,
                "peak_memory_bytes": outcome.memory_bytes,
            },
        )


class _End(NamedTuple):
    status: ExecutionStatus
    exit_code: int


def _end(outcome: Outcome) -> _End:
    """Return the status and the exit code that a shell would show."""
    code = 128 + (outcome.signal or 0) if outcome.exit_code is None else outcome.exit_code
    if outcome.ended is End.WALL:
        return _End(ExecutionStatus.TIMEOUT, 124)
    if outcome.ended is End.STOPPED:
        return _End(ExecutionStatus.CANCELLED, code)
    return _End(ExecutionStatus.SUCCESS if outcome.ended is End.ITSELF and code == 0 else ExecutionStatus.ERROR, code)


def _reason(command: Command, outcome: Outcome, *, silent: bool) -> str:
    """Say why the command was ended, if its own error output cannot say it. A signal is named for `silent` commands."""
    if outcome.ended is End.OUTPUT:
        return f"The command was stopped: it wrote more than {command.output_bytes:,} bytes."
    if outcome.oom_kills and outcome.signal == 9:
        return "The command was killed: all memory of the sandbox was used up."
    if outcome.signal is not None and outcome.ended is End.ITSELF and silent:
        return f"The command was ended by signal {outcome.signal}."
    return ""
