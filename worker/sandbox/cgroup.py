"""The kernel's own counters of a container, read on the host: what decides a verdict need not be taken on trust.

Works on cgroup version 1 and 2, for workers that see the host's cgroups. Where they do not (a worker that is itself
in a container, a remote engine), the agent's view of its own cgroup is all there is.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from worker.sandbox.base import Usage

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Reading:
    """At one moment."""

    cpu_seconds: float
    oom_kills: int
    peak_bytes: int
    base_bytes: int = 0
    """Memory in use at the start of the run."""


class Cgroup:
    """The open counters of one container."""

    def __init__(self, pid: int) -> None:
        paths = _paths(pid)
        memory, unified = paths.get("memory"), paths.get("")
        self._quota = paths["cpu"] / "cpu.cfs_quota_us" if "cpu" in paths else (unified or ROOT) / "cpu.max"
        try:
            if memory is not None:
                self._cpu = _open(paths["cpuacct"] / "cpuacct.usage")
                self._oom = _open(memory / "memory.oom_control")
                self._memory = _open(memory / "memory.usage_in_bytes")
                self._peak = _open(memory / "memory.max_usage_in_bytes", os.O_RDWR)
            elif unified is not None:
                self._cpu = _open(unified / "cpu.stat")
                self._oom = _open(unified / "memory.events")
                self._memory = _open(unified / "memory.current")
                self._peak = _open(unified / "memory.peak", os.O_RDWR)
            else:
                raise OSError("no memory controller")
            self._pids = _open(paths.get("pids", unified or ROOT) / "pids.current")
            with suppress(OSError):  # a kernel may lack it
                freezer = paths.get("freezer")
                self._frozen = _open(freezer / "freezer.state" if freezer else (unified or ROOT) / "cgroup.events")
        except BaseException:
            self.close()
            raise

    def start(self) -> Reading:
        """Before a run: the peak counts anew from here."""
        with suppress(OSError):  # version 2 before Linux 6.12 cannot: then a peak is this run's own only if it moves
            os.pwrite(self._peak, b"0", 0)
        return replace(self.read(), base_bytes=int(os.pread(self._memory, 64, 0)))

    def read(self) -> Reading:
        """Now."""
        cpu = os.pread(self._cpu, 4096, 0).split()
        oom = os.pread(self._oom, 4096, 0).split()
        return Reading(
            cpu_seconds=int(cpu[0]) / 1e9 if len(cpu) == 1 else int(cpu[cpu.index(b"usage_usec") + 1]) / 1e6,
            oom_kills=int(oom[oom.index(b"oom_kill") + 1]),
            peak_bytes=int(os.pread(self._peak, 64, 0)),
        )

    def usage(self) -> Usage:
        """Now, for people."""
        memory, processes = int(os.pread(self._memory, 64, 0)), int(os.pread(self._pids, 64, 0))
        return Usage(self.read().cpu_seconds, memory, processes)

    def frozen(self) -> bool:
        """Whether the container is paused now. False if the kernel does not show it."""
        fd = self.__dict__.get("_frozen")
        state = b"" if fd is None else os.pread(fd, 4096, 0)
        return state.startswith((b"FROZEN", b"FREEZING")) or b"frozen 1" in state

    def unthrottle(self) -> None:
        """Lift the CPU quota: a crowd of processes that fights for memory under it can take minutes to kill."""
        with suppress(OSError):
            self._quota.write_text("max" if self._quota.name == "cpu.max" else "-1")

    def close(self) -> None:
        """Let go of the files; the kernel removes the directory with the container."""
        for name in ("_cpu", "_oom", "_memory", "_peak", "_pids", "_frozen"):
            fd = self.__dict__.pop(name, None)
            if fd is not None:
                os.close(fd)


def find(pid: int) -> Cgroup | None:
    """The counters of a process's container, where this worker may see them."""
    try:
        return Cgroup(pid)
    except (OSError, KeyError, ValueError):
        return None


def _paths(pid: int) -> dict[str, Path]:
    """Controller → directory; the unified hierarchy of version 2 has the empty name."""
    found: dict[str, Path] = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            for mount in (controllers, controller):
                directory = ROOT / mount / path.lstrip("/")
                if directory.is_dir():
                    found[controller] = directory
                    break
    return found


def _open(path: Path, flags: int = os.O_RDONLY) -> int:
    return os.open(path, flags | os.O_CLOEXEC)
