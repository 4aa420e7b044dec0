"""Measures the work that is not bulk, each kind beside what a user would do instead, in interleaved rounds."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from bench.contestants import complete
from evalpool.api import submit_job
from evalpool.schemas import Case, JobSpec, Limits
from evalpool.schemas.settings import settings

AT_ONCE = 64
"""Callers that wait for a result at the same time."""
PROCESSES = 8
CPP = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n * 2 << std::endl; }\n"


class Lane(NamedTuple):
    """What one kind of work achieved in one round; both figures have the same unit."""

    evalpool: float
    peer: float

    @property
    def share(self) -> float:
        """Ours as a share of the peer's."""
        return self.evalpool / self.peer


def trivial(count: int, **fields: Any) -> list[JobSpec]:
    """Return jobs that do next to nothing, no two of them alike."""
    began = time.time_ns()
    return [JobSpec(code=f"{began + number}", **fields) for number in range(count)]


def rate(act: Callable[[], object], jobs: int) -> float:
    """Return the jobs per second of a call."""
    start = time.perf_counter()
    act()
    return jobs / (time.perf_counter() - start)


def batch(specs: Sequence[JobSpec]) -> float:
    """Return the jobs per second of a batch."""
    return rate(lambda: complete(specs), len(specs))


def mixed_limits(jobs: int) -> Lane:
    """Four memory limits and two process limits in turn, beside one shape."""
    shapes = [Limits(memory_mib=memory, processes=count) for memory in (128, 256, 512, 768) for count in (32, 64)]
    same = trivial(jobs)
    mixed = [
        spec.model_copy(update={"limits": shapes[place % len(shapes)]}) for place, spec in enumerate(trivial(jobs))
    ]
    return Lane(batch(mixed), batch(same))


def languages(jobs: int) -> Lane:
    """Python, C++ and bash in turn, beside the three after each other. The sources are the same, so that nothing is
    compiled in the rounds that count."""
    kinds = [
        [JobSpec(code="print(int(input()) * 2)", cases=[Case("21", "42")])] * (jobs // 3),
        [JobSpec(code=CPP, tool="multi_code_executor", language="cpp", cases=[Case("21", "42")])] * (jobs // 3),
        [JobSpec(code="read n; echo $((n * 2))", tool="shell_executor", cases=[Case("21", "42")])] * (jobs // 3),
    ]
    in_turn = [spec for three in zip(*kinds, strict=True) for spec in three]
    return Lane(batch(in_turn), rate(lambda: [complete(kind) for kind in kinds], len(in_turn)))


def cases(jobs: int) -> Lane:
    """Jobs with 20 cases, beside as many jobs with one case as there are cases; the unit is seconds."""
    code, given = "print(int(input()) * 2)", [Case(str(number), str(2 * number)) for number in range(20)]
    count = jobs // 20
    together = [spec.model_copy(update={"code": f"{code}  # {spec.code}", "cases": given}) for spec in trivial(count)]
    apart = [
        spec.model_copy(update={"code": f"{code}  # {spec.code}", "cases": [given[place % 20]]})
        for place, spec in enumerate(trivial(20 * count))
    ]
    return Lane(20 * count / (20 * batch(together)), 20 * count / batch(apart))


class Waits(NamedTuple):
    """What callers that wait for single jobs see."""

    rate: float
    seconds: list[float]
    """From the submission of a job to its result."""


def at_once(jobs: int, callers: int) -> Waits:
    """Submit jobs one by one from several threads, each of which waits for its result."""

    def one(spec: JobSpec) -> float:
        start = time.perf_counter()
        result = submit_job(spec).result(timeout=600)
        if not result.passed:
            raise RuntimeError(f"a job did not pass: {result.detail}")
        return time.perf_counter() - start

    specs = trivial(jobs)
    with ThreadPoolExecutor(callers) as threads:
        start = time.perf_counter()
        seconds = list(threads.map(one, specs))
        return Waits(jobs / (time.perf_counter() - start), seconds)


def from_processes(jobs: int) -> Waits:
    """Do the same from several processes, which begin at the same time."""
    each, threads = jobs // PROCESSES, AT_ONCE // PROCESSES
    command = [sys.executable, "-m", "bench.lanes", str(each), str(threads)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
        for _ in range(PROCESSES)
    ]
    for child in children:
        child.stdout.readline()  # ready
    start = time.perf_counter()
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    seconds = [each for child in children for each in json.loads(child.communicate()[0])]
    return Waits(each * PROCESSES / (time.perf_counter() - start), seconds)


def environment() -> dict[str, str]:
    """Return the variables with which a process uses the Redis and the database of this run."""
    import os

    now = settings()
    return os.environ | {
        "EVALPOOL_REDIS_URL": now.queue_url,
        "EVALPOOL_DATABASE_URL": now.store_url,
        "EVALPOOL_FLEET": now.fleet or "",
        "EVALPOOL_STATE_DIR": str(now.state_dir),
    }


def waiting(jobs: int, rounds: int, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Measure single jobs of many callers on the configured database, beside a batch of the same jobs."""
    found: dict[str, list[tuple[Waits, float]]] = {"at_once": [], "processes": []}
    for number in range(rounds):
        whole = batch(trivial(jobs))
        for name, act in (("at_once", lambda: at_once(jobs, AT_ONCE)), ("processes", lambda: from_processes(jobs))):
            waits = act()
            found[name].append((waits, whole))
            say(f"round {number + 1} of {rounds}: {name} {waits.rate:.0f} of {whole:.0f} jobs per second")
    return {name: summary(pairs) for name, pairs in found.items()}


def summary(pairs: Sequence[tuple[Waits, float]]) -> dict[str, float]:
    """Return the medians of all rounds."""
    shares = [waits.rate / whole for waits, whole in pairs]
    late = [percentile(waits.seconds, 0.99) / (AT_ONCE / waits.rate) for waits, _ in pairs]
    return {
        "evalpool": round(statistics.median(waits.rate for waits, _ in pairs), 1),
        "peer": round(statistics.median(whole for _, whole in pairs), 1),
        "share": round(statistics.median(shares), 3),
        "p99_of_ideal": round(statistics.median(late), 2),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of all values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    count, callers = int(sys.argv[1]), int(sys.argv[2])
    at_once(2 * callers, callers)  # opens the connections
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(at_once(count, callers).seconds))
