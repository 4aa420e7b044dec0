"""Runs the benchmark: all contestants take turns in several rounds, so that noise of the machine affects all alike."""

import argparse
import json
import platform
import statistics
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table

from bench import lanes, measure, steps
from bench.contestants import EVERYBODY, Contestant, DockerExec, fleet
from bench.programs import references, some
from evalpool.schemas.settings import settings
from evalpool.worker.sandbox.agent import USUAL

LATEST = Path(__file__).parent / "latest.json"
console = Console(stderr=True)


def say(what: str) -> None:
    """Print a line of progress to stderr."""
    console.print(f"[bright_black]{time.strftime('%H:%M:%S')}[/]  {what}")


class Throughput(NamedTuple):
    """What the contestants have achieved."""

    rates: dict[str, list[float]]
    """Contestant → jobs per second in each round."""
    latencies: dict[str, dict[str, float]]
    """Percentiles of one job at a time in milliseconds, measured while all contestants were idle."""


def throughput(rounds: int, quick: bool, slots: int) -> Throughput:
    """Measure all contestants."""
    rates: dict[str, list[float]] = {}
    sizes = (
        {True: 3 * len(references()), False: 24} if quick else {True: 8 * len(references()), False: len(references())}
    )
    with fleet(slots), ExitStack() as stack:
        contestants: list[Contestant] = []
        for kind in EVERYBODY:
            say(f"getting ready: {kind.title}")
            contestant = kind(slots, settings().image, [*USUAL, *settings().preload])
            stack.callback(contestant.stop)
            contestant.start()
            contestants.append(contestant)
        (exec_container,) = (each.containers[0] for each in contestants if isinstance(each, DockerExec))
        latencies = measure.latency(exec_container, 20 if quick else 100)
        for number in range(rounds):
            for contestant in contestants[number % len(contestants) :] + contestants[: number % len(contestants)]:
                programs = some(sizes[contestant.quick])
                seconds = measure.timed(lambda: contestant.run(programs))  # noqa: B023 - called here and now
                rate = len(programs) / seconds
                rates.setdefault(contestant.key, []).append(rate)
                say(f"round {number + 1} of {rounds}: {contestant.key:18} {rate:8.1f} jobs per second")
    return Throughput({kind.key: rates[kind.key] for kind in EVERYBODY}, latencies)


def main() -> None:
    """Measure everything, print the tables, and write `latest.json`."""
    options = argparse.ArgumentParser(prog="make bench")
    options.add_argument("--quick", action="store_true", help="run a smaller benchmark, in about ten minutes")
    quick = options.parse_args().quick
    slots, rounds = measure.slots_here(), 3 if quick else 5
    began = time.monotonic()

    rates, latencies = throughput(rounds, quick, slots)
    say("submission")
    submitted = measure.submission(10_000 if quick else 100_000)
    say("programs of 200 ms")
    busy = measure.busy_cores(slots, 40 if quick else 60)
    say("what each step costs")
    by_step = steps.costs(1000 if quick else 5000)
    by_process = measure.cpu_by_process(1000 if quick else 5000, slots)
    say("more slots")
    by_slots = measure.by_slots([1, 2, 4, 8], 400 if quick else 2000)
    say("work that is not bulk")
    by_lane = lanes.measure(rounds, 300 if quick else 1000, slots, say)
    say("larger batches")
    scaling, memory = measure.scaling([1000, 3000] if quick else [1000, 10_000, 100_000], slots)

    medians = {key: round(statistics.median(values), 1) for key, values in rates.items()}
    found: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpus": slots,
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        },
        "quick": quick,
        "rounds": rounds,
        "throughput": medians,
        "rounds_of": {key: [round(value, 1) for value in values] for key, values in rates.items()},
        "ratios": {key: round(medians["evalpool_warm"] / value, 2) for key, value in medians.items()},
        "submit_per_second": round(submitted),
        "latency_ms": latencies,
        "latency_ratio": round(latencies["evalpool"]["p50"] / latencies["docker_exec"]["p50"], 3),
        "busy_cores": busy,
        "step_us": by_step,
        "process_us": by_process,
        "slots": by_slots,
        "lanes": by_lane,
        "scaling": scaling,
        "worker_mib": memory,
        "seconds": round(time.monotonic() - began),
    }
    LATEST.write_text(json.dumps(found, indent=2) + "\n")
    show(found)


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    out = Console()
    titles = {kind.key: kind.title for kind in EVERYBODY}
    table = Table("", "jobs/s", "evalpool warm is", box=ROUNDED, border_style="bright_black")
    for key, rate in sorted(found["throughput"].items(), key=lambda item: -item[1]):
        table.add_row(
            titles[key], f"{rate:.1f}", f"{found['ratios'][key]:.2f} x", style="bold" if key == "evalpool_warm" else ""
        )
    out.print(table)
    ours, theirs = found["latency_ms"]["evalpool"], found["latency_ms"]["docker_exec"]
    lines = {
        "one job, submit_job to result": f"p50 {ours['p50']} ms, p95 {ours['p95']} ms",
        "docker exec python3 -c pass": f"p50 {theirs['p50']} ms, p95 {theirs['p95']} ms: {found['latency_ratio']}",
        "submission": f"{found['submit_per_second']} jobs per second",
        "programs of 200 ms": f"{found['busy_cores']['share_of_bare_processes']} of bare processes",
        "per job, by size of the batch": ", ".join(f"{size}: {cost:.0f} µs" for size, cost in found["scaling"].items()),
        "worker's memory after it": ", ".join(f"{size}: {mib} MiB" for size, mib in found["worker_mib"].items()),
        "jobs per second, by slots": ", ".join(f"{count}: {rate}" for count, rate in found["slots"].items()),
        "CPU per job, by step": ", ".join(f"{step} {cost:.0f} µs" for step, cost in found["step_us"].items()),
        "CPU per job, by process": ", ".join(f"{who} {cost:.0f} µs" for who, cost in found["process_us"].items()),
    }
    table = Table("not bulk", "evalpool", "instead", "share", "p99 / ideal", box=ROUNDED, border_style="bright_black")
    for name, lane in found["lanes"].items():
        figures = [f"{lane[key]:.3g}" for key in ("evalpool", "peer", "share")]
        table.add_row(name, *figures, str(lane.get("p99_of_ideal", "")))
    out.print(table)
    table = Table(box=ROUNDED, border_style="bright_black", show_header=False)
    for name, text in lines.items():
        table.add_row(name, text)
    out.print(table)
    print(f"Medians of {found['rounds']} rounds, {found['machine']['cpus']} slots. Written to {LATEST}.")


if __name__ == "__main__":
    main()
