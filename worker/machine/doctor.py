"""The doctor: examines whether this machine is fit to run untrusted programs, and names the remedy for each problem."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import DockerException, ImageNotFound

from evalpool.schemas import images
from evalpool.schemas.job import LANGUAGES
from evalpool.schemas.settings import Settings, settings
from evalpool.worker.machine.images import installed
from evalpool.worker.sandbox.engine import silent
from evalpool.worker.sandbox.walls import bubblewrap


@dataclass(frozen=True)
class Finding:
    """The answer to one question about this machine."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Return the findings about the Docker engine, its images and the kernel."""
    try:
        client = docker.DockerClient.from_env(timeout=20)
        info = client.info()
    except DockerException as error:
        remedy = "start it (`deploy/setup docker` installs and starts an engine), or set DOCKER_HOST to a running one"
        return [Finding("docker engine", False, silent(error)[:200], remedy)]
    with closing(client):
        engine = Finding("docker engine", True, str(info["ServerVersion"]))
        return [engine, *_images(client), *_engine(info), *_kernel()]


def _images(client: docker.DockerClient) -> Iterator[Finding]:
    name = settings().image
    known = {image.tag: image for image in installed()}
    try:
        image = client.images.get(name)
        runs = f": {known[name].languages}" if name in known else ""
        yield Finding("sandbox image", True, f"{name} {str(image.id)[7:19]}, {image.attrs['Size'] / 1e6:.0f} MB{runs}")
    except ImageNotFound:
        yield Finding("sandbox image", False, f"{name} is missing", images.remedy(name, settings()))
    for tag, other in known.items():
        if tag != name:
            size = f"{other.size_bytes / 1e6:.0f} MB"
            yield Finding("another image", True, f"{tag} {other.id[7:19]}, {size}: {other.languages}")
    for recipe, what in (("code", "languages besides Python and bash"), ("notebook", "notebooks with plots")):
        wanted, usual = (getattr(each, f"{recipe}_image") for each in (settings(), Settings.model_construct()))
        if wanted not in known:
            try:
                client.images.get(wanted)
            except ImageNotFound:  # only those need it who use it; but an image that somebody has named must exist
                remedy = images.remedy(wanted, settings())
                yield Finding(
                    "another image", wanted == usual, f"{wanted} is missing, which {what} need: {remedy}", remedy
                )
    tools = "; ".join(f"{tool}: {', '.join(languages)}" for tool, languages in LANGUAGES.items())
    yield Finding("tools", True, f"{tools}; in the library also file_operation")


def _engine(info: dict[str, object]) -> Iterator[Finding]:
    security = " ".join(str(option) for option in info.get("SecurityOptions") or ())  # type: ignore[attr-defined]
    yield Finding("seccomp", "seccomp" in security, security or "none", "use an engine built with seccomp")
    for limit, key in (("memory limit", "MemoryLimit"), ("process limit", "PidsLimit"), ("cpu limit", "CpuCfsQuota")):
        ok = bool(info.get(key))
        yield Finding(limit, ok, "enforced" if ok else "not enforced", "enable this cgroup controller in the kernel")
    runtimes = [*(info.get("Runtimes") or ())]  # type: ignore[misc]
    if settings().runtime:
        found = f"{settings().runtime} is {'' if settings().runtime in runtimes else 'not '}among {', '.join(runtimes)}"
        remedy = "correct EVALPOOL_RUNTIME, or make the runtime known to the engine (daemon.json)"
        yield Finding("runtime", settings().runtime in runtimes, found, remedy)
    yield Finding("cgroup", True, f"version {info.get('CgroupVersion', '1')}, driver {info.get('CgroupDriver')}")


def _kernel() -> Iterator[Finding]:
    walls = bubblewrap()
    none = "bubblewrap is missing: LOCAL_PROCESS sandboxes would not be isolated (apt-get install bubblewrap)"
    yield Finding("without docker", True, f"LOCAL_PROCESS sandboxes are isolated by {walls}" if walls else none)
    swap = Path("/proc/swaps").read_text().count("\n") > 1
    yield Finding("swap", True, "on: limits hold, but a host that is short of memory gets slow" if swap else "off")
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    remedy = "sysctl kernel.core_pattern=core, so that a crash in a sandbox does not start a program on the host"
    yield Finding("core dumps", not pattern.startswith("|"), pattern, remedy)
