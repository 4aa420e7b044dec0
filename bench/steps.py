"""What each step of a job costs this machine's CPUs, taken one at a time, in microseconds per job."""

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench.contestants import fleet
from bench.programs import some
from schemas.database import Database
from schemas.lease import Lease
from schemas.result import Result
from schemas.settings import settings
from schemas.store import Store
from worker import celery
from worker.evaluation import finished, shape_of
from worker.sandbox.docker import DockerSandbox
from worker.sandbox.engine import Engine
from worker.tools.judge import case_result
from worker.tools.registry import TOOLS

CHUNK = 32


def costs(jobs: int) -> dict[str, float]:
    """The CPU time of this process in each step. What the sandbox itself uses is not in here."""
    with fleet(1, worker=False):
        store = Store(Database(settings().store_url))
        specs = [program.spec for program in some(jobs)]
        found: dict[str, float] = {}

        def step(name: str, act: Callable[[], Any]) -> Any:
            start = time.process_time()
            given = act()
            found[name] = round((time.process_time() - start) / jobs * 1e6, 1)
            return given

        client = celery.redis_client(settings().queue_url)
        step("submit", lambda: store.add_batch("steps", specs, None, None))
        step("wake", lambda: celery.wake(client, "steps"))
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
    """Every message there is."""
    with celery.app.connection_for_read(settings().broker_url) as connection, connection.channel() as channel:
        while message := channel.basic_get("evalpool.normal"):
            channel.basic_ack(message.delivery_tag)


async def _run(leases: list[Lease]) -> tuple[list[Result], float, float]:
    """The worker's own part of running and of resetting."""
    engine = Engine(settings().docker_timeout)
    box = DockerSandbox(shape_of(leases[0].spec, settings().image), engine, settings=settings())
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
    return results, round(run / len(leases) * 1e6, 1), round(reset / len(leases) * 1e6, 1)


def _of(lease: Lease, result: Result) -> Result:
    return result.model_copy(update={"job_id": lease.job_id})
