"""The direct line to an agent on this machine: two pipes of the agent's, opened through /proc, without the engine.

The engine copies every byte of the attached stream twice. Pipes are used, because a program could see sockets in
/proc/net/unix. Only root can open them from outside, and where the agent is on another machine, in a virtual machine,
or not visible to this worker, there is no such line: then the attached stream is used.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from evalpool.schemas.errors import SandboxLost


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
    except (TypeError, ValueError):
        raise SandboxLost("the agent offers an impossible line") from None
    line: list[int] = []
    for fd, name, flags in ((replies, replies_name, os.O_RDONLY), (requests, requests_name, os.O_WRONLY)):
        place = f"/proc/{pid}/fd/{fd}"
        try:
            # The name has the number of the pipe, so another process that happens to have this pid is not mistaken.
            if str(Path(place).readlink()) != name:
                break
            line.append(os.open(place, flags | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            break
    if len(line) == 2:
        return Line(*line)
    for fd in line:
        os.close(fd)
    return None
