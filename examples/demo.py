"""What `make demo` runs: the reference solutions of HumanEval, which must all pass, and some wrong, slow, greedy and
crashing programs, which must each fail in their own way. Brings up its own Redis and worker if none are configured."""

import sys
from pathlib import Path

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from api import BatchHandle, formats, reports, submit_batch
from api.display import Display
from api.embedded import embedded
from api.formats import humaneval
from api.runs import follow
from schemas import EvalpoolError, JobSpec, Limits, Verdict
from schemas.settings import settings

BAD_SAMPLES = Path(__file__).parent / "bad_samples.jsonl"


def reference_solutions() -> list[JobSpec]:
    """One sample for each of the 164 problems: the right one."""
    problems = humaneval.read_problems(humaneval.bundled()).values()
    return [humaneval.job(problem, problem["canonical_solution"], 0, Limits()) for problem in problems]


def bad_samples() -> list[JobSpec]:
    """Programs that fail, each with the verdict it should get as a label."""
    with formats.read(str(BAD_SAMPLES), "native") as data:
        return list(data.jobs())


def show(batch: BatchHandle) -> bool:
    """Print the report and what was expected; whether all verdicts are as they should be."""
    console = Console()
    console.print(reports.render(batch.report(k=(1,))))
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


def main() -> int:
    """Run the demo; its exit code."""
    good, bad = reference_solutions(), bad_samples()
    print(f"evaluating {len(good)} HumanEval reference solutions and {len(bad)} bad samples", file=sys.stderr)
    with embedded(settings()) as servers:
        batch = submit_batch(good + bad, name="demo")
        follow(batch, servers, Display(), resumes=False)
    if not show(batch):
        print("demo: FAILED: the verdicts above are not what they should be", file=sys.stderr)
        return 1
    print(f"All {len(good)} reference solutions passed, and all {len(bad)} bad samples failed as they should.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EvalpoolError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
