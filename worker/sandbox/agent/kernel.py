"""What the agent asks of the kernel: process controls, and the counters of its own cgroup (version 1 or 2)."""

import ctypes
import os
import resource
import time

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
ATTRIBUTES = 64
"""Bytes of a thread's attributes in the C library, at most."""
THREAD_STACK = 8 << 20
"""Bytes of the stack of a thread that a module starts when it is preloaded."""
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 36, 38
DESCRIPTORS = 256
"""Descriptors that a process may have open at a time."""


def prctl(option: int, value: int) -> None:
    """Call prctl; raise OSError if it fails."""
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def fence() -> None:
    """Set the limits that are the same for every program, for this process and all that it will ever start."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o022)
    _limit(resource.RLIMIT_NOFILE, DESCRIPTORS)
    _limit(resource.RLIMIT_CORE, 1)  # not 0, of which a handler at the end of a pipe would not be told
    _limit(resource.RLIMIT_MEMLOCK, 1 << 16)
    _limit(resource.RLIMIT_MSGQUEUE, 0)
    _limit(resource.RLIMIT_SIGPENDING, 256)
    _limit_threads(THREAD_STACK)


def set_limits(limits: dict[str, float]) -> None:
    """Set the limits of this program, as a second fence inside those of the cgroup."""
    _limit(resource.RLIMIT_CPU, int(limits["cpu_seconds"]) + 2)  # later than the limit that the agent itself enforces
    _limit(resource.RLIMIT_FSIZE, int(limits["file_mib"]) << 20)
    _limit(resource.RLIMIT_NPROC, int(limits["processes"]))
    _limit(resource.RLIMIT_STACK, int(limits["stack_bytes"]))
    _limit_threads(int(limits["stack_bytes"]))


def become(uid: int) -> None:
    """Become another user for good: no group, no capability, no way back."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _limit(name: int, value: int) -> None:
    hard = resource.getrlimit(name)[1]
    value = value if hard < 0 else min(value, hard)
    if hard != value:  # gVisor does not know them all, and then reports none to spare
        resource.setrlimit(name, (value, value))


def _limit_threads(stack: int) -> None:
    """Limit the stacks of threads. The C library took their size from the agent's own limit, when the agent started;
    other programs take it from theirs."""
    try:
        choose = _libc.pthread_setattr_default_np
    except AttributeError:
        return  # a C library whose threads have small stacks in any case
    attributes = ctypes.create_string_buffer(ATTRIBUTES)
    _libc.pthread_attr_init(attributes)
    _libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(stack))
    choose(attributes)


def own_bytes() -> int:
    """Return the memory of this process that is backed by no file; 0 where the kernel does not tell."""
    with open("/proc/self/status", "rb") as file:
        words = file.read().split()
    return int(words[words.index(b"RssAnon:") + 1]) << 10 if b"RssAnon:" in words else 0


class Counters:
    """The agent's own view of its cgroup. Every counter reads 0 where the host does not show it."""

    def __init__(self) -> None:
        v1, v2 = "/sys/fs/cgroup/memory/memory.", "/sys/fs/cgroup/memory."
        self._cpu = _open("/sys/fs/cgroup/cpuacct/cpuacct.usage", "/sys/fs/cgroup/cpu.stat")
        self._memory = _open(v1 + "usage_in_bytes", v2 + "current")
        self._peak = _open(v1 + "max_usage_in_bytes", v2 + "peak")
        self._oom = _open(v1 + "oom_control", v2 + "events")
        self._pids = _open("/sys/fs/cgroup/pids/pids.current", "/sys/fs/cgroup/pids.current")
        self._pids_peak = _open("/sys/fs/cgroup/pids/pids.peak", "/sys/fs/cgroup/pids.peak")

    def snapshot(self) -> dict[str, float]:
        """Return all counters, to be compared after a run."""
        return {
            "cpu": self.cpu_seconds(),
            "own": time.process_time(),
            "memory": self.memory_bytes(),
            "peak": self.peak_bytes(),
            "oom": self.oom_kills(),
            "pids": self.processes_peak(),
        }

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes in the sandbox, including the agent."""
        text = _text(self._cpu)
        if text.startswith(b"usage_usec"):
            return int(text.split(None, 2)[1]) / 1e6
        return int(text or 0) / 1e9

    def memory_bytes(self) -> int:
        """Return the memory in use now."""
        return int(_text(self._memory) or 0)

    def peak_bytes(self) -> int:
        """Return the most memory that was in use at once, since the worker last reset this counter."""
        return int(_text(self._peak) or 0)

    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed for memory."""
        words = _text(self._oom).split()
        return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0

    def processes(self) -> int:
        """Return how many processes and threads are alive now, including the agent."""
        return int(_text(self._pids) or 0)

    def processes_peak(self) -> int:
        """Return how many processes and threads were alive at once, at most."""
        return int(_text(self._pids_peak) or 0)


def runnable() -> bool:
    """Return whether any thread in the sandbox, except our own, has a CPU or is ready to run without one."""
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[0] == b"R":
                        return True
        except (OSError, IndexError):
            continue  # it has just ended
    return False


def descendants(pid: int) -> set[int]:
    """Return all descendants of a process, as far as one look can tell."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it has just ended
            children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        new = children.get(todo.pop(), [])
        found.update(new)
        todo += new
    return found


def _open(*paths: str) -> int | None:
    for path in paths:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return None


def _text(fd: int | None) -> bytes:
    return b"" if fd is None else os.pread(fd, 1024, 0)
