"""The direct line to an agent on this machine: two pipes of the agent's, opened through /proc, without the engine.

The engine copies every byte of the attached stream twice. Pipes are used, because a program could see sockets in
/proc/net/unix. Only root can open them from outside, and where the agent is on another machine, in a virtual machine,
or not visible to this worker, there is no such line: then the attached stream is used.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

from evalpool.schemas.errors import SandboxLost

PIPE = re.compile(r"pipe:\[[0-9]+\]")
"""The name of a pipe that is in no folder, with its number, which no other pipe of the machine has."""


class Line(NamedTuple):
    """The worker's ends of the two pipes, as descriptors that do not block."""

    replies: int
    requests: int


def opened(pid: int, offer: Any) -> Line | None:
    """Open the line that an agent offers in its greeting; return None if this worker cannot reach it. `pid` is the
    agent's, as the engine names it, which may mean another process here, or none."""
    if not offer:
        return None
    try:
        (replies, replies_name), (requests, requests_name) = ((int(fd), name) for fd, name in offer)
    except (TypeError, ValueError, OverflowError):
        raise SandboxLost("the agent offers an impossible line") from None
    line: list[int] = []
    for fd, name, flags in ((replies, replies_name, os.O_RDONLY), (requests, requests_name, os.O_WRONLY)):
        try:
            line.append(_open(f"/proc/{pid}/fd/{fd}", name, flags))
        except OSError:
            break
    if len(line) == 2:
        return Line(*line)
    for fd in line:
        os.close(fd)
    return None


def _open(place: str, name: Any, flags: int) -> int:
    """Open a pipe of another process, if it has this name; raise `OSError` for anything else. The process may offer
    whatever it has, and to open a device or a file would already do something to it: so it is looked at first."""
    handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
    try:
        found = f"/proc/self/fd/{handle}"
        # The name has the number of the pipe, so another process that happens to have this pid is not mistaken.
        if (
            not stat.S_ISFIFO(os.fstat(handle).st_mode)
            or str(Path(found).readlink()) != name
            or not PIPE.fullmatch(name)
        ):
            raise OSError(f"{place} is not the pipe {name}")
        return os.open(found, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(handle)
