"""What every contestant runs: the reference solutions of HumanEval, each with its tests. All of them pass."""

from dataclasses import dataclass
from functools import cache

from api.formats import humaneval
from schemas import JobSpec, Limits


@dataclass(frozen=True)
class Program:
    """One problem, in the forms that the contestants want."""

    task_id: str
    spec: JobSpec
    completion: str

    @property
    def script(self) -> str:
        """As one file."""
        return f"{self.spec.code}\n{self.spec.check}\n"


@cache
def references() -> tuple[Program, ...]:
    """All 164."""
    problems = humaneval.read_problems(humaneval.bundled()).values()
    return tuple(
        Program(
            problem["task_id"],
            humaneval.job(problem, problem["canonical_solution"], 0, Limits()),
            problem["canonical_solution"],
        )
        for problem in problems
    )


def some(count: int) -> list[Program]:
    """So many of them, spread evenly over the set; over and over where there are more to be than there are."""
    known = references()
    if count >= len(known):
        return [known[i % len(known)] for i in range(count)]
    return [known[i * len(known) // count] for i in range(count)]
