"""Measures the work that is not bulk, each kind beside what a user would do instead, in interleaved rounds."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

from bench.contestants import DockerExec, complete, fleet
from evalpool.api import submit_job
from evalpool.schemas import Case, JobSpec, Limits
from evalpool.schemas.settings import settings
from tests.faults.servers import PostgresServer

AT_ONCE = 64
"""Callers that wait for a result at the same time."""
PROCESSES = 8
WARM_UP = 120
"""Jobs that are run before a kind of work is measured, so that its sandboxes are there."""
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
    complete(in_turn[:WARM_UP])
    return Lane(batch(in_turn), rate(lambda: [complete(kind) for kind in kinds], len(in_turn)))


def cases(jobs: int) -> Lane:
    """Jobs with 20 cases, beside as many jobs with one case as there are cases; the unit is seconds."""
    code, given = "print(int(input()) * 2)", tuple(Case(str(number), str(2 * number)) for number in range(20))
    count = jobs // 20
    together = [spec.model_copy(update={"code": f"{code}  # {spec.code}", "cases": given}) for spec in trivial(count)]
    apart = [
        spec.model_copy(update={"code": f"{code}  # {spec.code}", "cases": (given[place % 20],)})
        for place, spec in enumerate(trivial(20 * count))
    ]
    return Lane(20 * count / (20 * batch(together)), 20 * count / batch(apart))


def imports(module: str, image: str, jobs: int) -> dict[str, Lane]:
    """Jobs that import a module, beside a `python3` process for each in containers of the same image, and beside the
    same jobs without the import."""

    def importing(count: int) -> list[JobSpec]:
        return [
            spec.model_copy(update={"code": f"import {module}\n{spec.code}"}) for spec in trivial(count, image=image)
        ]

    complete(trivial(WARM_UP, image=image))
    for _ in range(2):  # the sandboxes that have imported the module are started while the first jobs run without them
        complete(importing(WARM_UP))
    ours, plain = batch(importing(jobs)), batch(trivial(jobs, image=image))
    return {f"{module}_import": Lane(ours, fresh(module, image, jobs // 10)), f"{module}_share": Lane(ours, plain)}


def fresh(module: str, image: str, processes: int) -> float:
    """Return how many `python3` processes that import a module end per second, one container for each slot."""
    each = max(1, processes // settings().slots)
    loop = f"for _ in $(seq {each}); do python3 -c 'import {module}' || exit 1; done"
    command = ["docker", "run", "--rm", "--network=none", "--entrypoint", "sh", image, "-c"]
    empty = [subprocess.Popen([*command, "true"]) for _ in range(settings().slots)]
    start = time.perf_counter()
    for child in empty:
        child.wait()
    overhead = time.perf_counter() - start
    start = time.perf_counter()
    loops = [subprocess.Popen([*command, loop]) for _ in range(settings().slots)]
    if any(child.wait() for child in loops):
        raise RuntimeError(f"{image} cannot import {module}")
    return each * settings().slots / max(0.01, time.perf_counter() - start - overhead)


def one_at_a_time(container: str, pairs: int) -> Lane:
    """One job after the other, beside `docker exec … python3 -c pass`; the unit is seconds."""
    ours = at_once(pairs, 1).seconds
    theirs = []
    for _ in range(pairs):
        start = time.perf_counter()
        DockerExec.execute(container, ["python3", "-c", "pass"])
        theirs.append(time.perf_counter() - start)
    return Lane(statistics.median(ours), statistics.median(theirs))


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

    specs, contexts = trivial(jobs), [copy_context() for _ in range(jobs)]
    with ThreadPoolExecutor(callers) as threads:
        start = time.perf_counter()
        # The settings of this run belong to the context, which a plain thread does not inherit.
        seconds = list(threads.map(lambda spec, context: context.run(one, spec), specs, contexts))
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
    start = time.monotonic()
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    told = [json.loads(child.communicate()[0]) for child in children]
    # The end of the last job counts, and not that of the processes, which is slow: interpreters take themselves apart.
    end = max(answer["end"] for answer in told)
    return Waits(each * PROCESSES / (end - start), [one for answer in told for one in answer["seconds"]])


def environment() -> dict[str, str]:
    """Return the variables with which a process uses the Redis and the database of this run."""
    now = settings()
    return os.environ | {
        "EVALPOOL_REDIS_URL": now.queue_url,
        "EVALPOOL_DATABASE_URL": now.store_url,
        "EVALPOOL_FLEET": now.fleet or "",
        "EVALPOOL_STATE_DIR": str(now.state_dir),
    }


def measure(rounds: int, jobs: int, slots: int, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Measure every lane in interleaved rounds, and return the medians."""
    found: dict[str, list[Lane]] = {}
    late: dict[str, list[float]] = {}
    postgres = PostgresServer().start()
    exec_container = DockerExec(1, settings().image, [])
    exec_container.start()
    try:
        for number in range(rounds):
            for name, url in (("sqlite", None), ("postgresql", postgres.url("postgres"))):
                with fleet(slots, database=url and url.replace("postgresql://", "postgresql+psycopg://", 1)):
                    complete(trivial(100))
                    lanes = _waiting(name, jobs, late) | {
                        f"one_at_a_time_{name}": one_at_a_time(exec_container.containers[0], 40)
                    }
                    if url is None:
                        lanes |= {
                            "mixed_limits": mixed_limits(jobs),
                            "languages": languages(jobs),
                            "cases": cases(jobs),
                        }
                        lanes |= imports("numpy", settings().image, jobs)
                        lanes |= imports("pandas", settings().notebook_image, jobs)
                for lane, pair in lanes.items():
                    found.setdefault(lane, []).append(pair)
                    say(f"lanes, round {number + 1} of {rounds}: {lane:24} {pair.share:.2f}")
    finally:
        exec_container.stop()
        postgres.close()
    return {
        name: {
            "evalpool": round(statistics.median(pair.evalpool for pair in pairs), 4),
            "peer": round(statistics.median(pair.peer for pair in pairs), 4),
            "share": round(statistics.median(pair.share for pair in pairs), 3),
        }
        | ({"p99_of_ideal": round(statistics.median(late[name]), 2)} if name in late else {})
        for name, pairs in found.items()
    }


def _waiting(database: str, jobs: int, late: dict[str, list[float]]) -> dict[str, Lane]:
    """Single jobs of many callers, beside a batch of as many jobs; `late` gets the 99th percentile of each."""
    whole = batch(trivial(jobs))
    lanes = {}
    for name, act in (("at_once", partial(at_once, jobs, AT_ONCE)), ("processes", partial(from_processes, jobs))):
        waits = act()
        lanes[f"{name}_{database}"] = Lane(waits.rate, whole)
        late.setdefault(f"{name}_{database}", []).append(percentile(waits.seconds, 0.99) / (AT_ONCE / waits.rate))
    return lanes


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of all values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    count, callers = int(sys.argv[1]), int(sys.argv[2])
    at_once(2 * callers, callers)  # opens the connections
    print("ready", flush=True)
    sys.stdin.readline()
    waits = at_once(count, callers)
    print(json.dumps({"seconds": waits.seconds, "end": time.monotonic()}))
