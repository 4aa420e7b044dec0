"""What confines a command of a local sandbox: bubblewrap, which builds walls around it, and the limits of a process."""

import resource
import shutil
import signal
from functools import lru_cache
from pathlib import Path

from evalpool.schemas.limits import Limits
from evalpool.worker.sandbox.agent.kernel import DESCRIPTORS
from evalpool.worker.sandbox.agent.words import HOME
from evalpool.worker.sandbox.base import Shape

BIND = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/fonts")
"""The parts of the machine's own system that a command sees, read-only."""
CODE = "/code"
"""The folder of scripts, as a command behind walls sees it."""


@lru_cache(maxsize=1)
def bubblewrap() -> str | None:
    """Return the path of bubblewrap's program, or None if it is not installed."""
    return shutil.which("bwrap")


def behind(
    argv: tuple[str, ...], cwd: str, *, shape: Shape, folder: Path, scripts: Path, uid: int | None, filter_fd: int
) -> tuple[str, ...]:
    """Return the command line that runs `argv` behind walls.

    `folder` becomes the sandbox's home and `scripts` becomes `CODE`; `filter_fd` holds the syscall filter. A worker
    that is root gives the `uid` that the command must have instead.
    """
    binds = [word for path in BIND for word in ("--ro-bind-try", path, path)]
    drop: tuple[str, ...] = ("--unshare-user",)
    become: tuple[str, ...] = ("prlimit", f"--nproc={shape.processes}")  # in a namespace that has no other processes
    small = ("--perms", "1777", "--size", str(shape.disk_mib << 20), "--tmpfs")
    if uid is not None:
        drop = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
        ids = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
        become = ("setpriv", *ids, "--no-new-privs", "--inh-caps=-all", "--")
    return (
        str(bubblewrap()), "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", *drop,
        "--perms", "0755", "--dir", "/etc", *binds,
        "--proc", "/proc", "--dev", "/dev", *small, "/tmp", *small, HOME,
        "--ro-bind", str(scripts), CODE, "--bind", str(folder), shape.home,
        "--hostname", "sandbox", "--die-with-parent", "--seccomp", str(filter_fd), "--", *become,
        "env", "-C", cwd, *argv,
    )  # fmt: skip


def limit(limits: Limits | None, shape: Shape | None, uid: int | None) -> None:
    """Limit this process, which is about to become a command, for want of a count over all processes of a sandbox.

    `limits` are those of a program, and the `shape` is that of a sandbox with walls; either may be missing.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a worker that was started in the background ignores it
    _most(resource.RLIMIT_CORE, 0)
    if limits is not None:
        seconds = max(1, round(limits.cpu_seconds + 0.499))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if shape is not None:
        _most(resource.RLIMIT_DATA, shape.memory_mib << 20)
        _most(resource.RLIMIT_FSIZE, shape.disk_mib << 20)
        _most(resource.RLIMIT_NOFILE, DESCRIPTORS)
        if uid is not None:  # else the limit would count all processes of the worker's user
            _most(resource.RLIMIT_NPROC, shape.processes)


def _most(name: int, value: int) -> None:
    hard = resource.getrlimit(name)[1]
    value = value if hard < 0 else min(value, hard)
    resource.setrlimit(name, (value, value))
