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
from typing import Any, TypeVar, cast

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from schemas.errors import SandboxLost, SetupError

T = TypeVar("T")

OWNER = "org.evalpool.owner"
"""Label of every container of ours: the process that owns it, so that nobody else's is ever touched."""
LATE_SECONDS = 300.0
"""How long after our call the engine may still make a container that we no longer wait for."""
CREATES_AT_ONCE = 4
"""The engine gets slower, not faster, with more."""


def owner() -> str:
    """This process, unmistakably: a pid alone may be used again."""
    return f"{_space()}:{os.getpid()}:{start_time(os.getpid())}"


def owner_alive(label: str) -> bool:
    """Whether the owner of a container still lives. Those we cannot see, elsewhere, are left to themselves."""
    space, pid, started = label.split(":")
    return space != _space() or start_time(int(pid)) == started


class ImageMissing(SetupError):  # noqa: N818
    """The engine does not have the image."""


class NoAgent(SandboxLost):
    """The image lacks the program that a container was to start with."""


class Engine:
    """One Docker engine. docker-py is not thread-safe, so every thread has a client of its own."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(CREATES_AT_ONCE, thread_name_prefix="docker")
        self._local = threading.local()
        self._clients: list[docker.APIClient] = []
        self._condemned: dict[str, float] = {}
        """Containers of ours that must go, and until when one that is not there may still come."""

    @property
    def api(self) -> docker.APIClient:
        """The calling thread's client."""
        if not hasattr(self._local, "api"):
            try:
                self._local.api = docker.DockerClient.from_env(timeout=int(self._timeout)).api
            except DockerException as error:
                raise SetupError(
                    f"the Docker engine does not answer ({error}); `evalpool doctor` looks closer"
                ) from error
            self._clients.append(self._local.api)
        return cast(docker.APIClient, self._local.api)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """A blocking call in a thread; whatever goes wrong in the engine is `SandboxLost`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, function, *args)
        except APIError as error:
            if "executable file not found" in str(error):
                raise NoAgent(str(error.explanation)) from error
            if isinstance(error, ImageNotFound):
                raise ImageMissing(
                    f"{error.explanation}; `evalpool images build python`, `code` or `notebook` makes evalpool's own, "
                    "and others must be here already (docker pull)"
                ) from error
            raise SandboxLost(f"Docker: {error.explanation or error}") from error
        except (DockerException, requests.RequestException, OSError) as error:
            raise SandboxLost(f"Docker: {error}") from error

    def _run(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return function(*args)
        finally:
            self.api.close()  # its idle connections: docker-py keeps one for each of the last 25 addresses it asked

    def launch(self, options: dict[str, Any]) -> tuple[str, int, str, socket.socket]:
        """Create, attach and start a container: its id, its process on the host, its image, its stream."""
        name = f"evalpool-{secrets.token_hex(8)}"
        try:
            container = self.api.create_container_from_config(options, name)["Id"]
        except (requests.Timeout, requests.ConnectionError):
            # The engine may make it after we have given up waiting; its name is all we know of it then.
            self._condemned[name] = time.monotonic() + LATE_SECONDS
            raise
        try:
            # Attached before the start, or the first bytes would be lost.
            attached = self.api.attach_socket(container, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
            stream = socket.socket(fileno=attached._sock.detach())  # ours alone: docker-py's wrappers never close it
            self.api.start(container)
            found = self.api.inspect_container(container)
        except BaseException:
            self.remove(container)
            raise
        stream.setblocking(False)
        return container, found["State"]["Pid"], found["Image"], stream

    def ends(self, container: str) -> set[str]:
        """What the engine noted of a container, which may be gone by now: `oom`, `kill` (from outside), `die`, or
        `left`: so ends an agent whose stream has ended, and no other."""
        filters = {"container": container, "event": ["oom", "kill", "die"]}
        # By the engine's own clock: it waits until then, and with ours ahead of it that could be for hours.
        now = datetime.fromisoformat(self.api.info()["SystemTime"])
        noted = self.api.events(since=1, until=int(now.timestamp()) + 1, filters=filters, decode=True)
        return {"left" if event["Actor"]["Attributes"].get("exitCode") == "0" else event["Action"] for event in noted}

    def ping(self, image: str) -> None:
        """Raises when the engine does not answer, or has not got the image that most jobs need."""
        self.api.inspect_image(image)

    def images(self) -> tuple[dict[str, str], frozenset[str]]:
        """The images of the engine: name → digest, and the digests of all, with or without a name."""
        found = self.api.images()
        names = {
            name: str(image["Id"])
            for image in found
            for name in [*(image["RepoTags"] or []), *(image["RepoDigests"] or [])]
            if "<none>" not in name
        }
        return names, frozenset(str(image["Id"]) for image in found)

    def has(self, image: str) -> bool:
        """Whether the image is here."""
        try:
            self.api.inspect_image(image)
        except ImageNotFound:
            return False
        return True

    def begin(self, container: str, argv: list[str], environment: list[str], uid: str) -> tuple[str, socket.socket]:
        """Start a process in a running container: its id and its stream. Only for images without an agent."""
        made = self.api.exec_create(
            container, argv, stdin=True, environment=environment, user=f"{uid}:{uid}", workdir="/box"
        )
        attached: Any = self.api.exec_start(made["Id"], socket=True)
        stream = socket.socket(fileno=attached._sock.detach())
        stream.setblocking(False)
        return made["Id"], stream

    def exit_code(self, exec_id: str) -> int | None:
        """Of a process started by `begin`; `None` while it runs, and where the engine has lost it."""
        found = self.api.exec_inspect(exec_id)
        return None if found["Running"] or found["ExitCode"] is None else int(found["ExitCode"])

    def remove(self, container: str) -> None:
        """Kill and remove a container; that it is gone already is as good. One that will not go is the sweeper's."""
        until = self._condemned.setdefault(container, 0.0)
        try:
            self.api.remove_container(container, force=True)
        except NotFound:
            if time.monotonic() < until:
                return
        except DockerException as error:
            if "already in progress" not in str(error):
                raise
            return
        self._condemned.pop(container, None)

    def sweep(self) -> int:
        """Remove the containers whose owner on this machine is dead, and try again those of our own that would not go;
        how many dead ones there were."""
        removed = 0
        for container in list(self._condemned):
            self.remove(container)
        for found in self.api.containers(all=True, filters={"label": OWNER}):
            if not owner_alive(found["Labels"][OWNER]):
                self.remove(found["Id"])
                removed += 1
        return removed

    def close(self) -> None:
        """Let go of threads and connections."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for client in self._clients:
            client.close()


def _space() -> str:
    """Where a pid means what it means here: this boot of this machine, this namespace of pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"


def start_time(pid: int) -> str:
    """When a process started, in ticks since the boot; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
