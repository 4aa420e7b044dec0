"""The programs of the benchmark: the reference solutions of HumanEval, each with its tests. All of them pass."""

from dataclasses import dataclass
from functools import cache

from evalpool.api.formats import humaneval
from evalpool.schemas import JobSpec, Limits


@dataclass(frozen=True)
class Program:
    """One program, in the forms that the contestants need."""

    task_id: str
    spec: JobSpec
    completion: str

    @property
    def script(self) -> str:
        """The program and its check as one file."""
        return f"{self.spec.code}\n{self.spec.check}\n"


@cache
def references() -> tuple[Program, ...]:
    """Return all 164 programs."""
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
    """Return so many programs, spread evenly over the set, or repeated if the set is smaller."""
    known = references()
    if count >= len(known):
        return [known[i % len(known)] for i in range(count)]
    return [known[i * len(known) // count] for i in range(count)]
