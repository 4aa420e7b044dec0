"""From a shape to the arguments of a container. Nothing of a job can add to them."""

from typing import Any

from schemas.images import exact
from worker.sandbox.agent import BOOTSTRAP
from worker.sandbox.base import Shape

AGENT_MIB = 16
"""What the agent itself needs on top of the program's memory: 7 MiB, and what it holds of an ordinary job."""
CAPABILITIES = ["SETUID", "SETGID", "KILL"]
"""All the agent has: to become the job's user and group, and to end its processes. Jobs have none."""
RUNTIME_THREADS = 128
"""What a runtime such as gVisor starts for itself in the sandbox's cgroup; there the job's own limit counts alone."""


def options(shape: Shape, labels: dict[str, str], runtime: str | None = None) -> dict[str, Any]:
    """The body of Docker's create call for a sandbox with our agent."""
    memory = (shape.memory_mib + AGENT_MIB + shape.extra_mib) << 20
    return {
        "Image": exact(shape.image),
        "Entrypoint": ["python3", "-c", BOOTSTRAP],
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", "HOME=/box", "PYTHONHASHSEED=0"],
        "Labels": labels,
        "Hostname": "sandbox",
        # The dead-man's switch: the worker holds standard input; when it dies the agent reads the end and exits.
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "NetworkDisabled": True,
        "StopSignal": "SIGKILL",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "AutoRemove": True,
            "Runtime": runtime or "",
            "Init": False,  # the agent is process 1: no signal from inside reaches it
            "NetworkMode": "none",
            "IpcMode": "private",
            "CgroupnsMode": "private",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "CapAdd": CAPABILITIES,
            "SecurityOpt": ["no-new-privileges"],
            "Memory": memory,
            "MemorySwap": memory,  # the same: no swap
            "OomScoreAdj": 500,
            # and the agent; and, for each command of a session, its keeper and what it is not yet
            "PidsLimit": shape.processes + 1 + 2 * shape.commands + (RUNTIME_THREADS if runtime else 0),
            "NanoCpus": int(shape.cpus * 1_000_000_000),
            "CpuShares": 256,
            "Tmpfs": _places(shape),
            "Ulimits": [
                {"Name": name, "Soft": value, "Hard": value}
                for name, value in (("core", 1), ("nofile", 1024), ("memlock", 65536), ("msgqueue", 0), ("rtprio", 0))
            ],
            "LogConfig": {"Type": "none", "Config": {}},  # output goes to the worker and nowhere else
        },
    }


def _places(shape: Shape) -> dict[str, str]:
    """The writable places, bounded in bytes and in inodes.

    What lies there counts as memory and outlives its writer. So together they must fit well below the memory limit:
    else a program could fill them up and leave the agent no room to breathe.
    """
    share = max(1, shape.memory_mib // 8)
    places: tuple[tuple[str, str, int, int], ...] = (
        ("/box", "exec", min(shape.disk_mib, 6 * share), 8192),
        ("/tmp", "noexec", min(16, share), 2048),
        ("/dev/shm", "noexec", min(8, share), 1024),
    )
    if shape.home != "/box":  # then there is nothing in the other but what compilers put there
        places = ((shape.home, *places[0][1:]), ("/box", "exec", min(16, share), 1024), *places[1:])
    return {
        path: f"rw,{exec_},nosuid,nodev,size={mib}m,nr_inodes={inodes},mode=1777" for path, exec_, mib, inodes in places
    }
