"""From a shape to the arguments of a container. No job can add to them."""

import secrets
from typing import Any

from evalpool.schemas.images import exact
from evalpool.worker.sandbox.agent import BOOTSTRAP
from evalpool.worker.sandbox.agent.words import HOME
from evalpool.worker.sandbox.base import Shape

AGENT_MIB = 16
"""Memory that the agent needs beside the program's: 7 MiB, and what it holds of an ordinary job."""
IMPORT_MIB = 8
"""Memory in addition for each module that is imported in advance: a program that changes the pages on which it lies has
copies of them, beside those of the agent."""
CAPABILITIES = ["SETUID", "SETGID", "KILL"]
"""All capabilities of the agent: to become the job's user and group, and to end its processes. Jobs have none."""
SOCKETS_MIB = 16
"""What the buffers of TCP and UDP sockets may hold where the kernel does not count them as memory; enough for servers
on localhost."""
RUNTIME_THREADS = 128
"""Threads that a runtime such as gVisor starts for itself in the sandbox's cgroup; the job's own limit still holds
inside."""
STACK_MIB = 8
"""How far a stack may always grow, however small the memory is."""
STACK_ROOM = 1 << 36
"""Bytes of addresses that are kept free for the stack of the agent and of its copies; a program's own limit is lower.
"""
FIRST_UID, UIDS = 1 << 20, 1 << 30
"""The user ids of jobs: the first one, and how many there are."""


def new_uid() -> int:
    """Return a user id for the jobs of one sandbox alone: the kernel counts many limits by user, in all containers."""
    return FIRST_UID + secrets.randbelow(UIDS)


def options(shape: Shape, labels: dict[str, str], runtime: str | None = None) -> dict[str, Any]:
    """Return the body of Docker's create call for a sandbox with our agent."""
    memory = memory_bytes(shape)
    return {
        "Image": exact(shape.image),
        "Entrypoint": ["python3", "-c", BOOTSTRAP],
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", f"HOME={HOME}", "PYTHONHASHSEED=0"],
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
            "MemorySwap": memory,  # equal to the memory, so that there is no swap
            "OomScoreAdj": 500,
            "PidsLimit": process_count(shape, runtime),
            "NanoCpus": int(shape.cpus * 1_000_000_000),
            "CpuShares": 256,
            "Tmpfs": _places(shape),
            "Ulimits": [
                {"Name": name, "Soft": value, "Hard": value}
                for name, value in (
                    ("core", 1),
                    ("nofile", 1024),
                    ("memlock", 65536),
                    ("msgqueue", 0),
                    ("rtprio", 0),
                    ("stack", STACK_ROOM),
                )
            ],
            "LogConfig": {"Type": "none", "Config": {}},  # output goes to the worker and nowhere else
        },
    }


def memory_bytes(shape: Shape) -> int:
    """Return the memory limit of a sandbox: what the program may use, and what the agent needs."""
    return (shape.memory_mib + AGENT_MIB + IMPORT_MIB * len(shape.preload) + shape.extra_mib) << 20


def process_count(shape: Shape, runtime: str | None = None) -> int:
    """Return how many processes and threads a sandbox may have: those of the program; the agent; and for each command
    of a session two, its keeper and a child about to become it."""
    return shape.processes + 1 + 2 * shape.commands + (RUNTIME_THREADS if runtime else 0)


def socket_bytes(shape: Shape) -> int:
    """Return how many bytes all TCP and UDP sockets of a sandbox may hold together, where those are not part of its
    memory."""
    return min(SOCKETS_MIB << 20, shape.memory_mib << 18)


def stack_bytes(shape: Shape) -> int:
    """Return how far a stack may grow, in bytes: as far as the memory allows, so that recursion may be deep.

    The agent sets it for each program. The container has a higher limit, `STACK_ROOM`, because the kernel leaves room
    for a stack when a process starts, and the programs of the warm interpreter are copies of the agent. A sixteenth is
    kept for other memory, so that endless recursion ends by a signal, and not sometimes by the memory limit.
    """
    return max(STACK_MIB << 20, shape.memory_mib * 15 << 16)


def _places(shape: Shape) -> dict[str, str]:
    """Return the writable places, each with its limits in bytes and in inodes.

    Files there count as memory and outlive their writer. A program whose memory limit is lower than what the places
    hold reaches that limit first; if this ends the agent, too, it is the program that was killed for memory.
    """
    places: tuple[tuple[str, str, int, int], ...] = (
        (HOME, "exec", shape.disk_mib, 8192),
        ("/tmp", "noexec", 16, 2048),
        ("/dev/shm", "noexec", 8, 1024),
    )
    if shape.home != HOME:  # then only compilers put something into the other one
        places = ((shape.home, *places[0][1:]), (HOME, "exec", 16, 1024), *places[1:])
    return {
        path: f"rw,{exec_},nosuid,nodev,size={mib}m,nr_inodes={inodes},mode=1777" for path, exec_, mib, inodes in places
    }
