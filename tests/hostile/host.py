"""What the host can see of a worker and its sandboxes from outside, without asking either."""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, NotFound

from worker.sandbox.engine import OWNER

JOB_UIDS = 1 << 20
"""Jobs run as users from here on; nobody else on a host does."""
CGROUPS = Path("/sys/fs/cgroup")


@dataclass
class Box:
    """One container of the worker's, alive or gone."""

    id: str
    memory: int
    """Bytes that it may use: the part of its shape that cases change."""
    upper: Path
    """Where its writable layer lies on the host."""
    merged: str
    """Where its root is mounted on the host."""
    killed: bool = False
    """The worker asked for its end."""
    exit_code: int | None = None
    """Of process 1, once it is dead."""
    gone: bool = False


class Boxes:
    """All containers the worker has ever had, by following Docker's events."""

    def __init__(self, client: docker.DockerClient, worker_pid: int) -> None:
        self._api = client.api
        self._pid = worker_pid
        self._known: dict[str, Box] = {}
        self._stream: Any = self._api.events(decode=True, filters={"type": "container", "label": OWNER})
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._stream.close()
        self._thread.join(10)

    def alive(self) -> dict[str, Box]:
        """Those that Docker knows now, whatever their state."""
        found = self._api.containers(all=True, filters={"label": OWNER})
        ids = [each["Id"] for each in found if self._ours(each["Labels"][OWNER])]
        return {each: self._box(each) for each in ids}

    def gone(self) -> list[Box]:
        """Those that are dead."""
        return [box for box in list(self._known.values()) if box.gone]

    def died_by_themselves(self) -> list[str]:
        """Containers whose agent ended although the worker had not closed the stream (then it ends with code 0) nor
        asked Docker to kill it: a program has got at it."""
        return [box.id for box in self.gone() if not box.killed and box.exit_code not in (0, None)]

    def forget_gone(self) -> None:
        """Those that were found to be well gone are not looked at again."""
        for box in self.gone():
            self._known.pop(box.id, None)

    def processes(self, box: Box) -> int:
        """How many processes the host counts in a container."""
        return len(_cgroup(box.id, "cgroup.procs").read_text().split())

    def leavings(self, box: Box) -> list[str]:
        """What a dead container has left on the host."""
        left = [f"cgroup of {box.id[:12]}"] if _cgroup(box.id, "").exists() else []
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return left + [line.split()[4] for line in mounts if box.id in line or (box.merged and box.merged in line)]

    def _ours(self, label: str) -> bool:
        return label.split(":")[1] == str(self._pid)

    def _box(self, container: str) -> Box:
        if container not in self._known:
            with suppress(NotFound):
                found = self._api.inspect_container(container)
                graph = found["GraphDriver"]["Data"]  # nothing while the container is being made or removed
                if graph:
                    box = Box(container, found["HostConfig"]["Memory"], Path(graph["UpperDir"]), graph["MergedDir"])
                    return self._known.setdefault(container, box)
        return self._known.get(container) or Box(container, 0, Path("/nonexistent"), "")

    def _follow(self) -> None:
        with suppress(DockerException, OSError, ValueError):
            for event in self._stream:
                attributes = event["Actor"]["Attributes"]
                if not self._ours(attributes.get(OWNER, ":")):
                    continue
                box = self._box(event["Actor"]["ID"])
                if event["Action"] == "kill":
                    box.killed = True
                elif event["Action"] == "die":
                    box.exit_code = int(attributes["exitCode"])
                elif event["Action"] == "destroy":
                    box.gone = True


def _cgroup(container: str, name: str) -> Path:
    """A file of a container's cgroup, wherever this host has it."""
    for base in ("pids/docker", "docker", "system.slice", "pids/system.slice"):
        for leaf in (container, f"docker-{container}.scope"):
            if (CGROUPS / base / leaf).is_dir():
                return CGROUPS / base / leaf / name
    return CGROUPS / "pids/docker" / container / name


def written(box: Box) -> int:
    """Bytes in a container's writable layer on the host's disk."""
    return sum(path.lstat().st_size for path in box.upper.rglob("*") if path.is_file() and not path.is_symlink())


def strangers() -> list[str]:
    """Files of jobs' users in the host's own temporary places, and IPC objects of theirs."""
    found = []
    for place in ("/tmp", "/dev/shm", "/var/tmp", "/dev/mqueue"):
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid >= JOB_UIDS:
                        found.append(entry.path)
    for kind in ("msg", "sem", "shm"):
        head, *rows = [line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()]
        uid = head.index("uid")
        found += [f"{kind} {row[1]}" for row in rows if int(row[uid]) >= JOB_UIDS]
    return found


def resident(pid: int, most: bool = False) -> int:
    """Bytes of memory a process holds, or the most that it held since `forget_most`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:" if most else "VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def forget_most(pid: int) -> None:
    """Let the kernel note the most memory of a process anew, where we may say so."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def pid_of(name: str) -> int | None:
    """The oldest process of this name, if it runs on this host."""
    for entry in sorted((path for path in Path("/proc").iterdir() if path.name.isdecimal()), key=lambda p: int(p.name)):
        with suppress(OSError):
            if (entry / "comm").read_text().strip() == name:
                return int(entry.name)
    return None
