"""Is this machine fit to run untrusted programs? Each question with its answer and, where it is no, the remedy."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import DockerException, ImageNotFound

from schemas.job import LANGUAGES
from schemas.settings import Settings, settings
from worker.sandbox.images import installed


@dataclass(frozen=True)
class Finding:
    """One answer."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Everything about the Docker engine and the kernel under it."""
    try:
        client = docker.DockerClient.from_env(timeout=20)
        info = client.info()
    except DockerException as error:
        remedy = "start it (`deploy/setup docker` installs and starts one), or set DOCKER_HOST to one that runs"
        return [Finding("docker engine", False, str(error).splitlines()[0][:200], remedy)]
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
        yield Finding("sandbox image", False, f"{name} is missing", "evalpool images build")
    for tag, other in known.items():
        if tag != name:
            size = f"{other.size_bytes / 1e6:.0f} MB"
            yield Finding("another image", True, f"{tag} {other.id[7:19]}, {size}: {other.languages}")
    for recipe, what in (("code", "languages besides Python and bash"), ("notebook", "notebooks with plots")):
        wanted, usual = (getattr(each, f"{recipe}_image") for each in (settings(), Settings.model_construct()))
        if wanted not in known:
            try:
                client.images.get(wanted)
            except ImageNotFound:  # nobody needs it who does not use it; but who names one expects it to be there
                remedy = f"evalpool images build {recipe}, or set EVALPOOL_{recipe.upper()}_IMAGE"
                yield Finding("another image", wanted == usual, f"{wanted} is missing, for {what}: {remedy}", remedy)
    tools = "; ".join(f"{tool}: {', '.join(languages)}" for tool, languages in LANGUAGES.items())
    yield Finding("tools", True, f"{tools}; and in the library, file_operation")


def _engine(info: dict[str, object]) -> Iterator[Finding]:
    security = " ".join(str(option) for option in info.get("SecurityOptions") or ())  # type: ignore[attr-defined]
    yield Finding("seccomp", "seccomp" in security, security or "none", "use an engine built with seccomp")
    for limit, key in (("memory limit", "MemoryLimit"), ("process limit", "PidsLimit"), ("cpu limit", "CpuCfsQuota")):
        ok = bool(info.get(key))
        yield Finding(limit, ok, "enforced" if ok else "not enforced", "enable this cgroup controller in the kernel")
    yield Finding("cgroup", True, f"version {info.get('CgroupVersion', '1')}, driver {info.get('CgroupDriver')}")


def _kernel() -> Iterator[Finding]:
    walls = shutil.which("bwrap")
    none = "no bubblewrap: sandboxes of the type LOCAL_PROCESS would have no walls (apt-get install bubblewrap)"
    yield Finding("without docker", True, f"LOCAL_PROCESS behind {walls}" if walls else none)
    swap = Path("/proc/swaps").read_text().count("\n") > 1
    yield Finding("swap", True, "on: limits hold, but a host under pressure gets slow" if swap else "off")
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    remedy = "sysctl kernel.core_pattern=core: a crashing program must not start one on the host"
    yield Finding("core dumps", not pattern.startswith("|"), pattern, remedy)
