"""What the host sees of a worker and its sandboxes from outside, without asking either."""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, NotFound

from evalpool.worker.sandbox.engine import OWNER
from evalpool.worker.sandbox.hardening import FIRST_UID

CGROUPS = Path("/sys/fs/cgroup")


@dataclass
class Container:
    """One container of the worker, alive or gone."""

    id: str
    memory: int
    """Bytes of memory that it may use: the part of its shape that cases change."""
    upper: Path
    """The folder of its writable layer on the host."""
    merged: str
    """The folder at which its root is mounted on the host."""
    killed: bool = False
    """Whether the worker asked Docker to kill it."""
    exit_code: int | None = None
    """The exit code of process 1, once that is dead."""
    gone: bool = False


class Containers:
    """All containers that the worker has ever had, known from Docker's events."""

    def __init__(self, client: docker.DockerClient, worker_pid: int) -> None:
        self._api = client.api
        self._pid = worker_pid
        self._known: dict[str, Container] = {}
        self._stream: Any = self._api.events(decode=True, filters={"type": "container", "label": OWNER})
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following the events."""
        self._stream.close()
        self._thread.join(10)

    def alive(self) -> dict[str, Container]:
        """Return the containers that Docker knows now, whatever their state."""
        found = self._api.containers(all=True, filters={"label": OWNER})
        ids = [each["Id"] for each in found if self._ours(each["Labels"][OWNER])]
        return {each: self._container(each) for each in ids}

    def gone(self) -> list[Container]:
        """Return the containers that are gone."""
        return [container for container in list(self._known.values()) if container.gone]

    def died_by_themselves(self) -> list[str]:
        """Return the containers whose agent ended although the worker had neither closed the stream (then it ends with
        code 0) nor asked Docker to kill it: a program has got at it."""
        return [
            container.id for container in self.gone() if not container.killed and container.exit_code not in (0, None)
        ]

    def forget_gone(self) -> None:
        """Forget the containers that are gone, after they were found to have left nothing behind."""
        for container in self.gone():
            self._known.pop(container.id, None)

    def processes(self, container: Container) -> int:
        """Return how many processes the host counts in a container."""
        return len(_cgroup(container.id, "cgroup.procs").read_text().split())

    def leavings(self, container: Container) -> list[str]:
        """Return what a dead container has left on the host."""
        left = [f"cgroup of {container.id[:12]}"] if _cgroup(container.id, "").exists() else []
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return left + [
            line.split()[4]
            for line in mounts
            if container.id in line or (container.merged and container.merged in line)
        ]

    def _ours(self, label: str) -> bool:
        return label.split(":")[1] == str(self._pid)

    def _container(self, id_: str) -> Container:
        if id_ not in self._known:
            with suppress(NotFound):
                found = self._api.inspect_container(id_)
                graph = found["GraphDriver"]["Data"]  # nothing while the container is being made or removed
                if graph:
                    memory = found["HostConfig"]["Memory"]
                    made = Container(id_, memory, Path(graph["UpperDir"]), graph["MergedDir"])
                    return self._known.setdefault(id_, made)
        return self._known.get(id_) or Container(id_, 0, Path("/nonexistent"), "")

    def _follow(self) -> None:
        with suppress(DockerException, OSError, ValueError):
            for event in self._stream:
                attributes = event["Actor"]["Attributes"]
                if not self._ours(attributes.get(OWNER, ":")):
                    continue
                container = self._container(event["Actor"]["ID"])
                if event["Action"] == "kill":
                    container.killed = True
                elif event["Action"] == "die":
                    container.exit_code = int(attributes["exitCode"])
                elif event["Action"] == "destroy":
                    container.gone = True


def _cgroup(container: str, name: str) -> Path:
    """Return the path of a file of a container's cgroup, wherever this host has it."""
    for base in ("pids/docker", "docker", "system.slice", "pids/system.slice"):
        for leaf in (container, f"docker-{container}.scope"):
            if (CGROUPS / base / leaf).is_dir():
                return CGROUPS / base / leaf / name
    return CGROUPS / "pids/docker" / container / name


def written(container: Container) -> int:
    """Return how many bytes are in a container's writable layer on the host's disk."""
    return sum(path.lstat().st_size for path in container.upper.rglob("*") if path.is_file() and not path.is_symlink())


def strangers() -> list[str]:
    """Return files in the host's own temporary places, and IPC objects, that belong to the users of jobs."""
    found = []
    for place in ("/tmp", "/dev/shm", "/var/tmp", "/dev/mqueue"):
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid >= FIRST_UID:
                        found.append(entry.path)
    for kind in ("msg", "sem", "shm"):
        head, *rows = [line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()]
        uid = head.index("uid")
        found += [f"{kind} {row[1]}" for row in rows if int(row[uid]) >= FIRST_UID]
    return found


def resident(pid: int, most: bool = False) -> int:
    """Return how many bytes of memory a process holds, or the most that it held since `forget_most`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:" if most else "VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def forget_most(pid: int) -> None:
    """Let the kernel count the peak memory of a process anew, if we are allowed to."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def pid_of(name: str) -> int | None:
    """Return the oldest process of this name, if one runs on this host."""
    for entry in sorted((path for path in Path("/proc").iterdir() if path.name.isdecimal()), key=lambda p: int(p.name)):
        with suppress(OSError):
            if (entry / "comm").read_text().strip() == name:
                return int(entry.name)
    return None
