"""Jobs whose verdict is known beforehand. Each prints its own number, so that results cannot be confused."""

from collections.abc import Sequence
from dataclasses import dataclass

from evalpool.schemas import Case, JobSpec, Limits, Verdict


@dataclass(frozen=True)
class Known:
    """A job, its verdict, and what it prints (`None` if the output is not compared)."""

    spec: JobSpec
    verdict: Verdict
    stdout: str | None = None


def mixed(count: int, *, seconds: float = 0.05, limits: bool = True, **more: object) -> list[Known]:
    """Return this many jobs of all kinds, most of which are quick. Those that sleep do so for `seconds`."""
    return [_known(index, seconds, limits, more) for index in range(count)]


def sleepers(count: int, seconds: float, **more: object) -> list[Known]:
    """Return jobs that sleep, and pass."""
    return [_passing(index, f"import time\ntime.sleep({seconds})\nprint({index})", more) for index in range(count)]


def quick(count: int, **more: object) -> list[Known]:
    """Return jobs that take no time, and pass."""
    return [_passing(index, f"print({index})", more) for index in range(count)]


def alike(jobs: Sequence[Known], samples: int) -> list[Known]:
    """Return each of these jobs several times in a row. The first is the leader, the others are its twins (identical
    jobs)."""
    return [
        Known(known.spec.model_copy(update={"sample_id": sample}), known.verdict, known.stdout)
        for known in jobs
        for sample in range(samples)
    ]


def _passing(index: int, code: str, more: dict[str, object]) -> Known:
    return Known(_spec(index, more, code=code), Verdict.PASSED, f"{index}\n")


def _spec(index: int, more: dict[str, object], **fields: object) -> JobSpec:
    return JobSpec(**{"task_id": index, "limits": Limits(cpu_seconds=10, wall_seconds=90)} | fields | more)


def _known(index: int, seconds: float, limits: bool, more: dict[str, object]) -> Known:
    kind, say = index % 20, f"print({index})\n"
    if kind == 3:
        return Known(_spec(index, more, code=say + "1 / 0"), Verdict.RUNTIME_ERROR, f"{index}\n")
    if kind == 5:
        return Known(_spec(index, more, code=say, check=f"assert {index} < 0"), Verdict.WRONG_ANSWER, f"{index}\n")
    if kind == 7:
        return Known(_spec(index, more, code=f"def {index}"), Verdict.COMPILE_ERROR, "")
    if kind == 9:
        code = f"import os\nprint({index}, flush=True)\nos._exit(0)"
        return Known(_spec(index, more, code=code, check="assert True"), Verdict.EARLY_EXIT, f"{index}\n")
    if kind == 11:
        code, cases = f"print(int(input()) + {index})", [Case("1", str(index + 1)), Case("2", str(index + 2))]
        return Known(_spec(index, more, code=code, cases=cases), Verdict.PASSED)
    if kind == 13:
        code, cases = f"print(int(input()) + {index})", [Case("1", str(index + 1)), Case("2", "no")]
        return Known(_spec(index, more, code=code, cases=cases), Verdict.WRONG_ANSWER)
    if kind == 15:
        return Known(_spec(index, more, code=f"echo {index}", tool="bash"), Verdict.PASSED, f"{index}\n")
    if kind == 16:
        return Known(_spec(index, more, code=f"echo {index}; exit 3", tool="bash"), Verdict.RUNTIME_ERROR, f"{index}\n")
    if limits and index % 60 == 17:
        slow = Limits(cpu_seconds=0.3, wall_seconds=90)
        return Known(_spec(index, more, code="while 1: pass", limits=slow), Verdict.TIME_LIMIT)
    if limits and index % 60 == 37:
        return Known(_spec(index, more, code="x = b'x' * (1 << 30)"), Verdict.MEMORY_LIMIT)
    if kind % 2:
        return _passing(index, say, more)
    return _passing(index, f"import time\ntime.sleep({seconds})\n{say}", more)
