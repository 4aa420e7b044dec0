"""One worker for the whole suite, and the ten invariants that must hold after every case (G1 to G10 of the table)."""

import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import docker
import pytest

from evalpool.api import submit_batch
from evalpool.schemas import JobSpec, Limits, Result, Verdict
from evalpool.schemas.job import MAX_TEXT
from evalpool.worker import turn
from evalpool.worker.pool import ALONE_SECONDS
from tests.conftest import PATIENCE, WorkerProcess, eventually
from tests.hostile.case import HostileCase, Step
from tests.hostile.host import Container, Containers, forget_most, pid_of, resident, strangers, written

SLOTS = 2
POOL = SLOTS + 1
GROWTH = 32 << 20
"""Bytes of memory by which the worker and dockerd may have grown after a case."""
SURGE = 256 << 20
"""Bytes of memory by which the worker may grow while a case runs: several times the largest possible job."""
LOG_LINE = 1000
"""Characters of a line in the worker's log, at most."""
HOLD = 0.1
"""Seconds of work for which the worker's event loop may be held up, whatever a program does."""
PARSING = 2e-8
"""Seconds in addition for each character of a job's own text, which is parsed in one step."""

CANARY = JobSpec(
    code="import os, sys, threading\n"
    "print(input(), sorted(os.listdir('.')), os.listdir('/tmp'), os.listdir('/dev/shm'),"
    " threading.active_count(), sys.gettrace(), os.umask(18))",
    stdin="all well",
    limits=Limits(cpu_seconds=2, wall_seconds=20),
)
CANARY_SAYS = "all well ['main.py'] [] [] 1 None 18\n"

NEIGHBOUR = JobSpec(
    code="import fcntl, os\nprint(sum(i * i % 7 for i in range(int(input()))),"
    " [fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) for fd in (1, os.pipe()[0])])",
    stdin="500000",
    limits=Limits(cpu_seconds=5, wall_seconds=30),
)
NEIGHBOUR_SAYS = "999999 [65536, 65536]\n"
NEIGHBOUR_FACTOR = 2.5
"""How many times more CPU time the neighbour may take than when alone: caches and cores are shared."""


@dataclass
class Seen:
    """The results of one case and of all jobs that ran with it."""

    case: HostileCase
    results: list[tuple[Step, Result]] = field(default_factory=list)
    neighbour: Result | None = None
    canaries: list[Result] = field(default_factory=list)
    before: list[Result] = field(default_factory=list)
    """The results of the step that was repeated before the case."""
    holds: int = 0
    """How many holds the monitor had noted before the case."""

    @property
    def all(self) -> list[Result]:
        return (
            [result for _, result in self.results]
            + self.canaries
            + self.before
            + ([self.neighbour] if self.neighbour else [])
        )


class Stack:
    """A real worker with a real queue and a real ledger; runs cases and examines the host afterwards."""

    def __init__(self, worker: WorkerProcess, client: docker.DockerClient, ledger: Path, holds: Path) -> None:
        self.worker, self.ledger, self._holds = worker, ledger, holds
        self.containers = Containers(client, worker.pid)
        self.dockerd = pid_of("dockerd")
        self.own = 1
        """Processes of an idle sandbox: the agent, and those that some runtimes need for themselves."""
        self.blamed: set[str] = set()
        """Containers that an earlier case has left busy. They were reported then, and the next case is not to blame."""

    def warm_up(self) -> None:
        """Run everything once, so that later measurements are compared with a worker in full swing."""
        big = "import sys; sys.stdout.write('x' * 10**6); sys.stderr.write('y' * 10**6)"
        self._together([JobSpec(code=big)] * 8 + [CANARY] * 40)
        self._together([JobSpec(code="#" * MAX_TEXT, stdin="x" * MAX_TEXT, limits=CANARY.limits)] * 6)
        alone = [self._together([NEIGHBOUR])[0].metrics.cpu_seconds for _ in range(7)]
        self.neighbour_cpu = median(alone)
        if os.environ.get("HOSTILE_RUNTIME"):
            self.own = max(self.containers.processes(container) for container in self.containers.alive().values())
        self._settle()
        self.resident = {pid: resident(pid) for pid in self._watched()}

    def close(self) -> None:
        """Stop following the containers; whoever started the worker ends it."""
        self.containers.close()

    # -- one case ----------------------------------------------------------------------------------

    def run(self, case: HostileCase, **more: Any) -> Seen:
        """Run the case with a neighbour beside it, then the steps that follow in the same sandbox, then canaries."""
        seen = Seen(case, holds=len(self.holds()))
        forget_most(self.worker.pid)
        if (until := case.until) is not None:
            eventually(lambda: self._is_ready(until, seen, **more))
        first, seen.neighbour = self._together([case.spec(**more), NEIGHBOUR])
        seen.results.append((case, first))
        for step in case.then:
            seen.results += self._follow(step, first, **more)
        seen.canaries = self._together([CANARY] * POOL)  # one after the other, they use every sandbox of the pool
        return seen

    def _is_ready(self, until: Step, seen: Seen, **more: Any) -> bool:
        seen.before += self._together([until.spec(**more)])
        return not until.problems(seen.before[-1])

    def _follow(self, step: Step, first: Result, **more: Any) -> list[tuple[Step, Result]]:
        """Repeat the step until it has run in the sandbox of the first result, or that sandbox is gone."""
        results = []
        for _ in range(4 * POOL):
            (result,) = self._together([step.spec(**more)])
            results.append((step, result))
            if result.sandbox_id == first.sandbox_id or first.sandbox_id not in self.containers.alive():
                return results
        raise AssertionError(f"the step never ran in {first.sandbox_id}")

    def _together(self, specs: Sequence[JobSpec]) -> list[Result]:
        batch = submit_batch(specs)
        batch.wait(timeout=PATIENCE)
        return batch.results()

    # -- what must hold afterwards -----------------------------------------------------------------

    def check(self, seen: Seen, log_start: int) -> None:
        """Fail the test unless the verdict is right and G1 to G10 hold."""
        problems = [
            f"step {i}: {problem}" for i, (step, result) in enumerate(seen.results) for problem in step.problems(result)
        ]
        problems += [problem for result in seen.all for problem in self._one_row(result)]  # G1
        problems += [problem for step, result in seen.results for problem in _in_time(step, result)]  # G2
        problems += [problem for step, result in seen.results for problem in _well_formed(step, result)]  # G8
        problems += [problem for result in seen.canaries for problem in _unlike(result, CANARY_SAYS)]  # G3
        problems += self._neighbour(seen)  # G9
        problems += self._settle(seen.case.agent_may_die)  # G4, G5, G7
        problems += [f"G5 on the host: {each}" for each in strangers()]
        problems += [f"G9 the worker's event loop was held up for {each} s" for each in self.held(seen)]
        problems += self._memory()  # G6
        problems += self._log(seen, log_start)  # G10
        if self.worker.process.poll() is not None:
            problems.append(f"the worker is dead: {self.worker.process.returncode}")
        if problems:
            pytest.fail("\n".join([*problems, *(_show(result) for _, result in seen.results)]), pytrace=False)

    def held(self, seen: Seen) -> list[float]:
        """Return the times, in seconds, for which the worker's event loop was held up too long."""
        given = max(step.repeat * len(step.code) + step.stdin_repeat * len(step.stdin) for step, _ in seen.results)
        return [each for each in self.holds()[seen.holds :] if each > HOLD + given * PARSING]

    def _one_row(self, result: Result) -> list[str]:
        with sqlite3.connect(self.ledger) as db:
            (rows,) = db.execute("SELECT count(*) FROM results WHERE job_id = ?", [result.job_id]).fetchone()
        db.close()
        problems = [f"G1 {rows} rows for {result.job_id}"] if rows != 1 else []
        if result.attempt != 1:
            problems.append(f"G1 {result.attempt} attempts for {result.job_id}: {result.detail}")
        return problems

    def _neighbour(self, seen: Seen) -> list[str]:
        result = seen.neighbour
        if result is None:
            return []
        problems = _unlike(result, NEIGHBOUR_SAYS, "G9 the neighbour")
        if self._slowed(result):
            problems.append(f"G9 the neighbour took {result.metrics.cpu_seconds:.2f} s, not {self.neighbour_cpu:.2f}")
        return problems

    def _slowed(self, neighbour: Result) -> bool:
        return neighbour.metrics.cpu_seconds > NEIGHBOUR_FACTOR * self.neighbour_cpu + 0.05

    def disturbed(self, seen: Seen, start: int) -> bool:
        """Return whether anything was slower than it should be, because of this case or of a busy machine. `start` is
        the size of the log before the case."""
        late = any(_in_time(step, result) for step, result in seen.results)
        late = late or any("action=given_back" in line for line in self._lines(start))  # a job waited for a second
        return late or bool(self.held(seen)) or (seen.neighbour is not None and self._slowed(seen.neighbour))

    def _settle(self, agent_may_die: bool = False) -> list[str]:
        """Wait until the pool is complete and idle, with only the agent in each container; return what is not so."""
        state: list[str] = []
        busy: set[str] = set()
        alive: list[Container] = []

        def idle() -> bool:
            alive[:] = [container for name, container in self.containers.alive().items() if name not in self.blamed]
            state[:] = [f"G7 {len(alive)} containers"] if len(alive) != POOL else []
            busy.clear()
            for container in alive:
                try:
                    processes = self.containers.processes(container)
                except OSError:
                    processes = 0
                if processes != self.own:
                    busy.add(container.id)
                    state.append(f"G4 {processes} processes in {container.id[:12]}")
            return not state

        _wait(idle, 15)
        self.blamed |= busy
        problems = list(state)
        if not agent_may_die:
            problems += [f"the agent of {container[:12]} died" for container in self.containers.died_by_themselves()]
        left: list[str] = []

        def clean() -> bool:
            left[:] = [each for container in self.containers.gone() for each in self.containers.leavings(container)]
            return not left

        _wait(clean, 10)
        self.containers.forget_gone()
        problems += [f"G5 left behind: {each}" for each in left]
        for container in alive:
            size = written(container)
            if size:
                problems.append(f"G5 {size} bytes on disk in the writable layer of {container.id[:12]}")
        return problems

    def _memory(self) -> list[str]:
        grown: dict[int, int] = {}

        def small() -> bool:
            grown.clear()
            grown.update({pid: resident(pid) - before for pid, before in self.resident.items()})
            return all(growth < GROWTH for growth in grown.values())

        _wait(small, 20)  # dockerd takes its time to give memory back
        names = {self.worker.pid: "worker", self.dockerd: "dockerd"}
        too_much = {pid: growth for pid, growth in grown.items() if growth >= GROWTH}
        for pid in too_much:
            self.resident[pid] = resident(pid)  # it is reported once, and the next case is not to blame
        problems = [f"G6 {names[pid]} grew by {growth >> 20} MiB" for pid, growth in too_much.items()]
        surge = resident(self.worker.pid, most=True) - self.resident[self.worker.pid]
        return problems + ([f"G6 the worker held {surge >> 20} MiB more meanwhile"] if surge > SURGE else [])

    def _watched(self) -> list[int]:
        return [self.worker.pid] + ([self.dockerd] if self.dockerd else [])

    def holds(self) -> list[float]:
        """Return for how many seconds the worker's event loop was held up, each time that it was."""
        return [float(line) for line in self._holds.read_text().split()] if self._holds.exists() else []

    def log_size(self) -> int:
        """Return the size of the worker's log, in bytes."""
        return self.worker.log.stat().st_size

    def _lines(self, start: int) -> list[str]:
        """Return the lines of the worker's log from this byte on."""
        with self.worker.log.open("rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", "replace").split("\n")[:-1]

    def _log(self, seen: Seen, start: int) -> list[str]:
        lines = self._lines(start)
        ids = {result.job_id for result in seen.all}
        told = [line for line in lines if "action=job_finished" in line and any(job in line for job in ids)]
        # A failed sweep is about the containers of other workers.
        others = [line for line in lines if line not in told and "action=sweep_failed" not in line]
        problems = [f"G10 {line[:300]!r}" for line in others]
        problems += [f"G10 a line of {len(line)} characters" for line in lines if len(line) > LOG_LINE]
        problems += [f"G10 not printable: {line[:300]!r}" for line in lines if not line.isprintable()]
        if len(told) > len(ids):
            problems.append(f"G10 {len(told)} lines for {len(ids)} jobs")
        return problems


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def _in_time(step: Step, result: Result) -> list[str]:
    runs = max(1, len(step.cases) * step.cases_repeat)
    limit = step.allowed.wall
    problems = []
    # A job that was starved because the machine is busy with something else is run again with patience.
    waited = turn.PATIENCE * limit if result.metrics.rerun else 0
    if result.metrics.wall_seconds > runs * (limit + 1) + waited:
        problems.append(f"G2 {result.metrics.wall_seconds:.1f} s of wall time; the limit is {limit:g} s")
    if result.started_at is not None:
        attempt = (result.finished_at - result.started_at).total_seconds() - result.metrics.setup_seconds
        again = waited + limit + ALONE_SECONDS if result.metrics.rerun else 0
        if attempt > runs * (limit + 3) + again:
            problems.append(f"G2 {attempt:.1f} s from the program's start to its result; the limit is {limit:g} s")
    if result.metrics.setup_seconds > limit + 4.5:  # the worker waits 5 s more than the limit for a lost agent
        problems.append(f"G2 {result.metrics.setup_seconds:.1f} s until the program started: was it tried twice?")
    return problems


def _well_formed(step: Step, result: Result) -> list[str]:
    problems = []
    text = result.model_dump_json()
    json.loads(text, parse_constant=lambda word: problems.append(f"G8 {word} in the result"))
    text.encode("utf-8", "strict")
    cap = step.allowed.output_bytes
    for ran in (result, *result.cases):
        for name in ("stdout", "stderr", "detail"):
            value = getattr(ran, name)
            if "\0" in value:
                problems.append(f"G8 NUL in {name}")
            if len(value) > (1000 if name == "detail" else cap):
                problems.append(f"G8 {len(value)} characters of {name}")
        if not ran.detail.isprintable():
            problems.append(f"G8 detail is not printable: {ran.detail!r}")
        for name, number in ran.metrics.model_dump().items():
            if not math.isfinite(number) or number < 0:
                problems.append(f"G8 {name} is {number}")
    if not result.detail:
        problems.append("G8 no detail")
    if result.passed != (result.verdict is Verdict.PASSED):
        problems.append("G8 passed and verdict disagree")
    return problems


def _unlike(result: Result, stdout: str, who: str = "G3 the canary") -> list[str]:
    if result.verdict is Verdict.PASSED and result.stdout == stdout:
        return []
    return [f"{who}: {result.verdict}, {result.stdout!r:.200}, {result.detail!r}, {result.stderr[-300:]!r}"]


def _show(result: Result) -> str:
    shown = {name: round(value, 3) for name, value in result.metrics.model_dump().items()}
    return (
        f"--- {result.verdict}, exit code {result.exit_code}, signal {result.signal}: {result.detail!r:.300}\n{shown}\n"
        f"stdout: {result.stdout[-2000:]!r}\nstderr: {result.stderr[-1500:]!r}"
    )
