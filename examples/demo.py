"""Runs the reference solutions of HumanEval, which must all pass, and some wrong, slow, greedy and crashing programs,
each of which must fail with its own verdict. `make demo` runs it. Without a configured Redis, it starts a private one
and a worker."""

import os
import sys
from pathlib import Path

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evalpool.api import BatchHandle, formats, submit_batch
from evalpool.api.formats import humaneval
from evalpool.api.reports import summary
from evalpool.api.runs import evaluate, export
from evalpool.schemas import EvalpoolError, JobSpec, Limits, Verdict
from evalpool.schemas.privacy import private_folder
from evalpool.schemas.settings import settings

BAD_SAMPLES = Path(__file__).parent / "bad_samples.jsonl"
NEXT = """\

The whole report, with every program that failed: {page}

What to try next:
- Evaluate a file of samples or jobs: {bin}/evalpool run examples/bad_samples.jsonl --out results
- Show this report again: {bin}/evalpool report {batch}
- Submit from Python: {bin}/python examples/quickstart.py, while {bin}/evalpool worker runs in another terminal
- Read on in README.md and docs/."""


def reference_solutions() -> list[JobSpec]:
    """Return the reference solutions of all 164 problems as jobs."""
    problems = humaneval.read_problems(humaneval.bundled()).values()
    return [humaneval.job(problem, problem["canonical_solution"], 0, Limits()) for problem in problems]


def bad_samples() -> list[JobSpec]:
    """Return programs that fail, each with its expected verdict as a label."""
    with formats.read(str(BAD_SAMPLES), "native") as data:
        return list(data.jobs())


def show(batch: BatchHandle) -> bool:
    """Print the report and the expected verdicts. Returns whether all verdicts are as expected."""
    console = Console()
    console.print(summary.render(batch.report(k=(1,))))
    table = Table("bad sample", "expected", "got", "what happened", box=ROUNDED, border_style="bright_black")
    surprises = []
    for result in batch.stream():
        expected = (result.labels or {}).get("expect", Verdict.PASSED)
        if result.verdict != expected:
            surprises.append(f"{result.task_id}: expected {expected}, got {result.verdict} ({result.detail})")
        if expected != Verdict.PASSED:
            colour = "green" if result.verdict == expected else "bold red"
            table.add_row(str(result.task_id), str(expected), Text(result.verdict, colour), Text(result.detail))
    console.print(table)
    for surprise in surprises:
        print(f"demo: {surprise}", file=sys.stderr)
    return not surprises


def farewell(batch: BatchHandle) -> None:
    """Write the report as a page, and print where it is and what to try next."""
    folder = settings().state_dir / "demo"
    private_folder(folder)
    export(batch, batch.report(k=(1,)), folder)
    print(NEXT.format(page=folder / "report.html", bin=os.path.relpath(Path(sys.executable).parent), batch=batch.id))


def main() -> int:
    """Run the demo and return its exit code."""
    good, bad = reference_solutions(), bad_samples()
    print(f"evaluating {len(good)} HumanEval reference solutions and {len(bad)} bad samples", file=sys.stderr)
    batch = evaluate(lambda _: submit_batch(good + bad, name="demo"), settings(), resumes=False)
    if not show(batch):
        print("demo: FAILED: the verdicts above are not as expected", file=sys.stderr)
        return 1
    print(f"All {len(good)} reference solutions passed, and all {len(bad)} bad samples failed as expected.")
    farewell(batch)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EvalpoolError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
