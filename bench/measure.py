"""Measures submission, latency, CPU time by process, and how costs grow with slots and batch size."""

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.contestants import DockerExec, complete, fleet
from bench.programs import some
from evalpool.api import submit_batch, submit_job
from evalpool.schemas import JobSpec
from evalpool.schemas.settings import settings

HERTZ = os.sysconf("SC_CLK_TCK")
TRIVIAL = JobSpec(code="pass")


def timed(act: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50": round(statistics.median(ordered) * 1000, 2),
        "p95": round(ordered[int(len(ordered) * 0.95)] * 1000, 2),
    }


def submission(jobs: int) -> float:
    """Return how many jobs of HumanEval's size one caller can submit per second, while no worker runs."""
    with fleet(1, worker=False):
        specs = [program.spec for program in some(jobs)]
        submit_job(TRIVIAL)  # opens the connections
        return jobs / timed(lambda: submit_batch(specs))


def latency(exec_container: str, pairs: int) -> dict[str, dict[str, float]]:
    """Return the latency of one job at a time on an idle system, measured in turn with `docker exec`."""
    ours, theirs = [], []
    for _ in range(pairs):
        ours.append(timed(lambda: submit_job(TRIVIAL).result(timeout=60)))
        theirs.append(timed(lambda: DockerExec.execute(exec_container, ["python3", "-c", "pass"])))
    return {"evalpool": spread(ours), "docker_exec": spread(theirs)}


class Scaling(NamedTuple):
    """How costs depend on the size of a batch."""

    costs: dict[str, float]
    """Size → microseconds per job, including submission."""
    memory: dict[str, float]
    """Size → MiB of memory of the worker afterwards."""


def scaling(sizes: Sequence[int], slots: int) -> Scaling:
    """Measure batches of these sizes. The smallest is measured before and after each of the others, and its median is
    taken, since its time is short."""
    costs: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    small, *others = sizes
    with fleet(slots) as servers:
        complete([program.spec for program in some(500)])
        for size in [small, small, *(each for other in others for each in (other, small, small))]:
            specs = [program.spec for program in some(size)]
            costs.setdefault(str(size), []).append(timed(lambda: complete(specs)) / size * 1e6)  # noqa: B023
            memory.setdefault(str(size), round(_resident(servers.children[-1].process.pid) / (1 << 20), 1))
    return Scaling({size: round(statistics.median(each), 1) for size, each in costs.items()}, memory)


def by_slots(counts: Sequence[int], jobs: int) -> dict[str, float]:
    """Return the jobs per second for each number of slots."""
    rates = {}
    for slots in counts:
        with fleet(slots):
            complete([program.spec for program in some(100)])
            specs = [program.spec for program in some(jobs)]
            rates[str(slots)] = round(jobs / timed(lambda: complete(specs)), 1)  # noqa: B023
    return rates


def busy_cores(slots: int, jobs: int) -> dict[str, float]:
    """Compare programs of 200 ms CPU time in so many slots with as many bare processes that do the same work."""
    burn = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
    ratios = []
    with fleet(slots):
        complete([JobSpec(code=burn)] * slots)
        for _ in range(3):
            loop = f"for _ in range({jobs // slots}):\n" + "".join(f"    {line}\n" for line in burn.splitlines())
            bare = timed(lambda: [p.wait() for p in [subprocess.Popen(["python3", "-c", loop]) for _ in range(slots)]])  # noqa: B023
            ours = timed(lambda: complete([JobSpec(code=burn)] * jobs))
            ratios.append(bare / ours)
    return {"slots": slots, "share_of_bare_processes": round(statistics.median(ratios), 3)}


def cpu_by_process(jobs: int, slots: int) -> dict[str, float]:
    """Return the CPU microseconds per job of each process that takes part."""
    with fleet(slots) as servers:
        complete([program.spec for program in some(500)])
        redis, worker = (child.process.pid for child in servers.children)
        who = {"redis": [redis], "worker": [worker], "submitter": [os.getpid()]}
        who |= {"dockerd": _named("dockerd"), "containerd": _named("containerd") + _named("containerd-shim")}
        specs = [program.spec for program in some(jobs)]
        before = {name: sum(map(_cpu, pids)) for name, pids in who.items()} | {"sandboxes": _sandbox_cpu()}
        complete(specs)
        after = {name: sum(map(_cpu, pids)) for name, pids in who.items()} | {"sandboxes": _sandbox_cpu()}
        return {name: round((after[name] - before[name]) / jobs * 1e6, 1) for name in after}


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / HERTZ


def _named(name: str) -> list[int]:
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == name[:15]:
                found.append(int(comm.parent.name))
        except OSError:
            continue
    return found


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _sandbox_cpu() -> float:
    """Return the CPU seconds of all containers so far; on version 2 of cgroups, of the running ones."""
    together = Path("/sys/fs/cgroup/cpuacct/docker/cpuacct.usage")
    if together.exists():
        return int(together.read_text()) / 1e9
    counters = Path("/sys/fs/cgroup").glob("**/docker-*/cpu.stat")
    return sum(int(counter.read_text().split()[1]) for counter in counters) / 1e6


def slots_here() -> int:
    """Return the number of slots that a worker would have here."""
    return settings().slots
