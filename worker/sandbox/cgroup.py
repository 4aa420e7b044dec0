"""The kernel's own counters and limits of a container, on the host, so that no verdict depends on what the agent says.

They can be read and set with cgroup version 1 and 2, by workers that see the host's cgroups. For other workers (one
that is itself in a container, or has a remote engine), the agent's view of its own cgroup is all there is, and the
engine sets the limits.
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from evalpool.worker.sandbox.base import Usage

ROOT = Path("/sys/fs/cgroup")
MEMORY_1, SWAP_1, SOCKETS_1 = (
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.kmem.tcp.limit_in_bytes",
)
"""The limits of version 1: of memory, of memory and swap, and of the buffers of TCP and UDP sockets."""
MEMORY_2, PROCESSES = "memory.max", "pids.max"
"""The limit of version 2 on memory, and that of both versions on processes."""


@dataclass(frozen=True)
class Reading:
    """The counters at one moment."""

    cpu_seconds: float
    """CPU time of all processes in the container."""
    agent_seconds: float
    """CPU time of the first process alone, which is our agent; 0 if that is gone."""
    oom_kills: int
    peak_bytes: int
    base_bytes: int = 0
    """Memory in use at the start of the run."""


class Cgroup:
    """The open counters of one container, and its limits."""

    def __init__(self, pid: int, container: str) -> None:
        paths = _paths(pid, container)
        memory, unified = paths.get("memory"), paths.get("")
        self._quota = paths["cpu"] / "cpu.cfs_quota_us" if "cpu" in paths else (unified or ROOT) / "cpu.max"
        self._reclaim = (unified or ROOT) / "memory.reclaim" if memory is None else None
        self._limits: dict[Path, int] = {}
        """The limits that are set when the sandbox is lent, each with a descriptor to read it, in the order in which
        they are lowered. With version 1, that of memory and swap together must never be below that of memory alone."""
        try:
            if memory is not None:
                self._cpu = _open(paths["cpuacct"] / "cpuacct.usage")
                self._oom = _open(memory / "memory.oom_control")
                self._memory = _open(memory / "memory.usage_in_bytes")
                self._peak = _open(memory / "memory.max_usage_in_bytes", os.O_RDWR)
                self._limited(memory / MEMORY_1)
                with suppress(OSError):  # a kernel may not count swap, or sockets
                    self._limited(memory / SWAP_1)
                with suppress(OSError):
                    self._limited(memory / SOCKETS_1)
            elif unified is not None:
                self._cpu = _open(unified / "cpu.stat")
                self._oom = _open(unified / "memory.events")
                self._memory = _open(unified / "memory.current")
                self._peak = _open(unified / "memory.peak", os.O_RDWR)
                self._limited(unified / MEMORY_2)
            else:
                raise OSError("the container has no memory controller")
            self._agent = _open(Path(f"/proc/{pid}/schedstat"))
            self._pids = _open(paths.get("pids", unified or ROOT) / "pids.current")
            self._limited(paths.get("pids", unified or ROOT) / PROCESSES)
            with suppress(OSError):  # a kernel may lack it
                freezer = paths.get("freezer")
                self._frozen = _open(freezer / "freezer.state" if freezer else (unified or ROOT) / "cgroup.events")
        except BaseException:
            self.close()
            raise

    def limit(self, memory: int, sockets: int, processes: int) -> bool:
        """Limit the memory of the container and the buffers of its TCP and UDP sockets, in bytes, and the number of its
        processes. Return whether these limits hold now: the kernel does not go below what is in use.

        Version 2 counts the buffers as memory. The engine cannot be asked to limit them with version 1: its runtime
        ignores the limits of kernel memory.
        """
        values = {SOCKETS_1: sockets, PROCESSES: processes}
        wanted = {path: values.get(path.name, memory) for path in self._limits}
        held = self._held()
        if held == wanted:
            return True
        try:
            if self._reclaim is not None and self.exceeds(memory):  # version 2 would kill processes to keep the limit
                with suppress(OSError):  # it could not free as much, or a kernel may lack it
                    self._reclaim.write_text(str(int(os.pread(self._memory, 64, 0)) - memory))
                if self.exceeds(memory):
                    return False
            # By path, since a descriptor that is closed meanwhile might be that of another file.
            for path in wanted if memory < next(iter(held.values())) else reversed(wanted):
                path.write_text(str(wanted[path]))
            return self._held() == wanted
        except OSError:  # version 1 could not free as much
            return False

    def exceeds(self, memory: int) -> bool:
        """Return whether more memory is in use, so that it takes a while to set this limit."""
        return int(os.pread(self._memory, 64, 0)) > memory

    def _held(self) -> dict[Path, int]:
        return {path: _number(fd) for path, fd in [*self._limits.items()]}  # it may be closed meanwhile

    def _limited(self, path: Path) -> None:
        self._limits[path] = _open(path)

    def start(self) -> Reading:
        """Return the counters before a run, and let the peak of memory count anew from here."""
        with suppress(OSError):  # before Linux 6.12, version 2 cannot: there, a peak is this run's own only if it moves
            os.pwrite(self._peak, b"0", 0)
        return replace(self.read(), base_bytes=int(os.pread(self._memory, 64, 0)))

    def read(self) -> Reading:
        """Return the counters as they are now."""
        agent = 0
        with suppress(ProcessLookupError):  # the container and its other counters may outlive the agent for a moment
            agent = int(os.pread(self._agent, 64, 0).split()[0])
        cpu = os.pread(self._cpu, 4096, 0).split()
        oom = os.pread(self._oom, 4096, 0).split()
        return Reading(
            cpu_seconds=int(cpu[0]) / 1e9 if len(cpu) == 1 else int(cpu[cpu.index(b"usage_usec") + 1]) / 1e6,
            agent_seconds=agent / 1e9,
            oom_kills=int(oom[oom.index(b"oom_kill") + 1]),
            peak_bytes=int(os.pread(self._peak, 64, 0)),
        )

    def usage(self) -> Usage:
        """Return what the container uses now."""
        memory, processes = int(os.pread(self._memory, 64, 0)), int(os.pread(self._pids, 64, 0))
        return Usage(self.read().cpu_seconds, memory, processes)

    def frozen(self) -> bool:
        """Return whether the container is paused now; False if the kernel does not show it."""
        fd = self.__dict__.get("_frozen")
        state = b"" if fd is None else os.pread(fd, 4096, 0)
        return state.startswith((b"FROZEN", b"FREEZING")) or b"frozen 1" in state

    def unthrottle(self) -> None:
        """Lift the CPU quota, under which it can take minutes to kill a crowd of processes that fight for memory."""
        with suppress(OSError):
            self._quota.write_text("max" if self._quota.name == "cpu.max" else "-1")

    def close(self) -> None:
        """Close the files; the kernel removes the directory together with the container."""
        for name in ("_cpu", "_agent", "_oom", "_memory", "_peak", "_pids", "_frozen"):
            fd = self.__dict__.pop(name, None)
            if fd is not None:
                os.close(fd)
        while self._limits:
            os.close(self._limits.popitem()[1])


def find(pid: int, container: str) -> Cgroup | None:
    """Return the counters of a container, or None if this worker cannot see them. `pid` is its first process, as the
    engine names it, which may mean another process here, or none."""
    try:
        return Cgroup(pid, container)
    except (OSError, KeyError, ValueError):
        return None


def _paths(pid: int, container: str) -> dict[str, Path]:
    """Return controller → directory; the unified hierarchy of version 2 has the empty name. Every engine names the
    directories of a container by its id, so those of another process are not taken for them."""
    found: dict[str, Path] = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if container not in path:
            continue
        for controller in controllers.split(","):
            for mount in (controllers, controller):
                directory = ROOT / mount / path.lstrip("/")
                if directory.is_dir():
                    found[controller] = directory
                    break
    return found


def _number(fd: int) -> int:
    text = os.pread(fd, 64, 0).strip()
    return sys.maxsize if text == b"max" else int(text)


def _open(path: Path, flags: int = os.O_RDONLY) -> int:
    return os.open(path, flags | os.O_CLOEXEC)
