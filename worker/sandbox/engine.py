"""The Docker engine, as far as evalpool uses it: blocking calls, each with a timeout, in threads of their own."""

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from evalpool.schemas.errors import ImageMissing, NoAgent, SandboxLost, SetupError
from evalpool.worker.sandbox.agent.words import HOME

T = TypeVar("T")

OWNER = "org.evalpool.owner"
"""The label of every container of ours. It names the process that owns it, so that no other container is ever
touched."""
LATE_SECONDS = 300.0
"""How long after our call the engine may still create a container that we no longer wait for."""
CREATES_AT_ONCE = 4
"""Containers that are created at a time; with more, the engine gets slower, not faster."""


def owner() -> str:
    """Return a name for this process that no other one ever has; a pid alone may be used again."""
    return f"{_space()}:{os.getpid()}:{start_time(os.getpid())}"


def owner_alive(label: str) -> bool:
    """Return whether the owner of a container still lives. An owner on another machine, which we cannot see, counts as
    alive."""
    space, pid, started = label.split(":")
    return space != _space() or start_time(int(pid)) == started


def why(error: BaseException) -> str:
    """Return what the system said: docker-py, requests and urllib3 wrap it in their own words, one around the other."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return str(error)


def silent(error: BaseException) -> str:
    """Return a sentence that says where the engine was looked for and why it cannot be reached."""
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    return f"the Docker engine at {host} does not answer ({why(error)})"


class Launched(NamedTuple):
    """A container that has just been started."""

    id: str
    pid: int
    """Its first process, as the host sees it."""
    image_digest: str
    stream: socket.socket


class Engine:
    """One Docker engine. docker-py is not thread-safe, so every thread has its own client."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(CREATES_AT_ONCE, thread_name_prefix="docker")
        self._local = threading.local()
        self._clients: list[docker.APIClient] = []
        self._condemned: dict[str, float] = {}
        """Containers of ours that must be removed, and until when one that does not exist yet may still appear."""

    @property
    def api(self) -> docker.APIClient:
        """The client of the calling thread."""
        if not hasattr(self._local, "api"):
            try:
                self._local.api = docker.DockerClient.from_env(timeout=int(self._timeout)).api
            except DockerException as error:
                raise SetupError(f"{silent(error)}; run `evalpool doctor` to find out more") from error
            self._clients.append(self._local.api)
        return cast(docker.APIClient, self._local.api)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Make a blocking call in a thread. Raises `SandboxLost` for whatever goes wrong in the engine, `NoAgent` if
        the image has no Python, and `ImageMissing`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, function, *args)
        except APIError as error:
            if "executable file not found" in str(error):
                raise NoAgent(str(error.explanation)) from error
            if isinstance(error, ImageNotFound):
                raise ImageMissing(
                    f"{error.explanation}; build one of evalpool's own images (`evalpool images build python`, `code` "
                    "or `notebook`), or fetch another one with `docker pull`"
                ) from error
            # An engine says "unknown runtime specified", or "unknown or invalid runtime name".
            wrong = "unknown" in str(error).lower() and "runtime" in str(error)
            remedy = "; correct EVALPOOL_RUNTIME (`docker info` lists the runtimes)" if wrong else ""
            raise SandboxLost(f"Docker: {error.explanation or error}{remedy}") from error
        except (DockerException, requests.RequestException, OSError) as error:
            raise SandboxLost(f"Docker: {why(error)}") from error

    def _run(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return function(*args)
        finally:
            self.api.close()  # idle connections: docker-py keeps one for each of the last 25 addresses that it asked

    def launch(self, options: dict[str, Any]) -> "Launched":
        """Create, attach and start a container."""
        self._refuse_volumes(options["Image"])
        name = f"evalpool-{secrets.token_hex(8)}"
        try:
            container = self.api.create_container_from_config(options, name)["Id"]
        except (requests.Timeout, requests.ConnectionError):
            # The engine may create it after we have given up waiting; its name is all that we know then.
            self._condemned[name] = time.monotonic() + LATE_SECONDS
            raise
        try:
            # Attach before the start, or the first bytes would be lost.
            attached = self.api.attach_socket(container, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
            stream = socket.socket(fileno=attached._sock.detach())  # ours alone: docker-py's wrappers never close it
            self.api.start(container)
            found = self.api.inspect_container(container)
        except BaseException:
            self.remove(container)
            raise
        stream.setblocking(False)
        return Launched(container, found["State"]["Pid"], found["Image"], stream)

    def _refuse_volumes(self, image: str) -> None:
        """Raise `SetupError` for an image with volumes: the engine would give each one a place on the host's disk,
        without a limit and out of reach of the reset."""
        found = self.api.inspect_image(image)
        if volumes := found["Config"].get("Volumes"):
            name = [*(found["RepoTags"] or []), image][0]
            raise SetupError(
                f"image: {name} declares volumes ({', '.join(sorted(volumes))}), which a sandbox cannot have; "
                "build it without VOLUME, or make another image from its files: "
                f"docker export $(docker create {name}) | docker import - NAME"
            )

    def update(self, container: str, memory: int, processes: int, lower: bool) -> bool:
        """Limit the memory of a container, in bytes, and the number of its processes. Return whether the engine has
        noted these limits, which it does after it has set them. A limit that is lower than the last one is not set
        below what is in use: with version 2 of cgroups, the kernel would kill processes to keep it."""
        wanted = {"Memory": memory, "MemorySwap": memory, "PidsLimit": processes}
        api: Any = self.api  # its public method does not know the limit of processes
        if lower:
            found = api.stats(container, stream=False, one_shot=True)["memory_stats"]
            counts = found.get("stats", {})
            cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
            if found.get("usage", 0) - cached > memory:
                return False
        api._result(api._post_json(api._url("/containers/{0}/update", container), data=wanted))
        host = api.inspect_container(container)["HostConfig"]
        return {name: host[name] for name in wanted} == wanted

    def ends(self, container: str, begun: float) -> set[str]:
        """Return the events that the engine has noted for a container since `begun` by the monotonic clock; the
        container may be gone by now. They are `oom`, `kill` (from outside), `die`, and `left`, which stands for an
        agent that exited because its stream had ended."""
        filters = {"container": container, "event": ["oom", "kill", "die"]}
        # The engine waits until the second time, and both must be by its own clock: ours may be hours ahead.
        api: Any = self.api  # its public method does not know of parts of a second
        now = datetime.fromisoformat(api.info()["SystemTime"]).timestamp()
        since = f"{now - (time.monotonic() - begun):.6f}"
        noted = api.events(since=since, until=int(now) + 1, filters=filters, decode=True)
        return {"left" if event["Actor"]["Attributes"].get("exitCode") == "0" else event["Action"] for event in noted}

    def ping(self, image: str) -> None:
        """Raise an error if the engine does not answer, or does not have the image."""
        self.api.inspect_image(image)

    def images(self) -> tuple[dict[str, str], frozenset[str]]:
        """Return the engine's images: name → digest, and the digests of all images, with or without a name."""
        found = self.api.images()
        names = {
            name: str(image["Id"])
            for image in found
            for name in [*(image["RepoTags"] or []), *(image["RepoDigests"] or [])]
            if "<none>" not in name
        }
        return names, frozenset(str(image["Id"]) for image in found)

    def has(self, image: str) -> bool:
        """Return whether the engine has the image."""
        try:
            self.api.inspect_image(image)
        except ImageNotFound:
            return False
        return True

    def begin(self, container: str, argv: list[str], environment: list[str], uid: str) -> tuple[str, socket.socket]:
        """Start a process in a running container; return its id and its stream. Only for images without an agent."""
        made = self.api.exec_create(
            container, argv, stdin=True, environment=environment, user=f"{uid}:{uid}", workdir=HOME
        )
        attached: Any = self.api.exec_start(made["Id"], socket=True)
        stream = socket.socket(fileno=attached._sock.detach())
        stream.setblocking(False)
        return made["Id"], stream

    def exit_code(self, exec_id: str) -> int | None:
        """Return the exit code of a process started by `begin`; None while it runs, and if the engine has lost it."""
        found = self.api.exec_inspect(exec_id)
        return None if found["Running"] or found["ExitCode"] is None else int(found["ExitCode"])

    def remove(self, container: str) -> None:
        """Kill and remove a container; one that is already gone is fine. `sweep` tries again if this fails."""
        until = self._condemned.setdefault(container, 0.0)
        try:
            self.api.remove_container(container, force=True, v=True)
        except NotFound:
            if time.monotonic() < until:
                return
        except DockerException as error:
            if "already in progress" not in str(error):
                raise
            return
        self._condemned.pop(container, None)

    def sweep(self) -> int:
        """Remove the containers whose owner on this machine is dead, and try again to remove those of our own that
        would not go. Return the number of containers that had a dead owner."""
        removed = 0
        for container in list(self._condemned):
            self.remove(container)
        for found in self.api.containers(all=True, filters={"label": OWNER}):
            if not owner_alive(found["Labels"][OWNER]):
                self.remove(found["Id"])
                removed += 1
        return removed

    def close(self) -> None:
        """End the threads and close the connections."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for client in self._clients:
            client.close()


def _space() -> str:
    """Return a name for the place in which our pids have a meaning: this boot of this machine, and this namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since the boot; an empty text if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
