"""Measures the CPU time of each step of a job by itself, in microseconds per job."""

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from bench.contestants import fleet
from bench.programs import some
from evalpool.schemas.database import Database
from evalpool.schemas.lease import Lease
from evalpool.schemas.result import Result
from evalpool.schemas.settings import settings
from evalpool.schemas.store import Store
from evalpool.worker.evaluation import finished, shape_of
from evalpool.worker.judge.judge import case_result
from evalpool.worker.queue import publish
from evalpool.worker.queue.celery import app
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.sandbox.engine import Engine
from evalpool.worker.tools.registry import TOOLS

CHUNK = 32


def costs(jobs: int) -> dict[str, float]:
    """Return the CPU time of this process in each step, without that of the sandbox."""
    with fleet(1, worker=False):
        store = Store(Database(settings().store_url))
        specs = [program.spec for program in some(jobs)]
        found: dict[str, float] = {}

        def step(name: str, act: Callable[[], Any]) -> Any:
            start = time.process_time()
            given = act()
            found[name] = round((time.process_time() - start) / jobs * 1e6, 1)
            return given

        client = publish.redis_client(settings().queue_url)
        step("submit", lambda: store.add_batch("steps", specs, None, None))
        step("wake", lambda: publish.wake(client, "steps"))
        step("ack", _acknowledge)
        leases: list[Lease] = step("lease", lambda: _in_parts(lambda: store.claim(CHUNK, "bench", 600).leases))
        some_leases = leases[:200]
        results, found["run"], found["reset"] = asyncio.run(_run(some_leases))
        everything = [_of(lease, results[number % len(results)]) for number, lease in enumerate(leases)]
        step("record", lambda: [store.record(everything[i : i + CHUNK]) for i in range(0, jobs, CHUNK)])
        step("read", lambda: list(store.batch_results("steps")))
        store.database.close()
    return found


def _in_parts(take: Callable[[], list[Lease]]) -> list[Lease]:
    taken: list[Lease] = []
    while part := take():
        taken += part
    return taken


def _acknowledge() -> None:
    """Acknowledge all messages in the queue."""
    with app.connection_for_read(settings().broker_url) as connection, connection.channel() as channel:
        while message := channel.basic_get("evalpool.normal"):
            channel.basic_ack(message.delivery_tag)


class _Runs(NamedTuple):
    results: list[Result]
    run: float
    """Microseconds per job."""
    reset: float


async def _run(leases: list[Lease]) -> _Runs:
    """Measure the worker's own part of running and of resetting."""
    engine = Engine(settings().docker_timeout)
    box = DockerBox(shape_of(leases[0].spec, settings().image), engine, settings=settings())
    await box.start()
    results, run, reset = [], 0.0, 0.0

    async def timed(act: Awaitable[Any]) -> tuple[Any, float]:
        start = resource.getrusage(resource.RUSAGE_THREAD)
        given = await act
        end = resource.getrusage(resource.RUSAGE_THREAD)
        return given, end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime

    async def evaluate(lease: Lease) -> Result:
        outcome = await box.run(TOOLS[lease.spec.tool].program(lease.spec, None))
        judged = case_result(0, outcome, lease.spec, None)
        return finished(lease, judged.verdict, judged.detail, "bench", metrics=judged.metrics)

    for lease in leases:
        result, seconds = await timed(evaluate(lease))
        results.append(result)
        run += seconds
        _, seconds = await timed(box.reset())
        reset += seconds
    await box.close()
    engine.close()
    return _Runs(results, round(run / len(leases) * 1e6, 1), round(reset / len(leases) * 1e6, 1))


def _of(lease: Lease, result: Result) -> Result:
    return result.model_copy(update={"job_id": lease.job_id})
