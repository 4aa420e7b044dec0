"""A tool turns a job into runs of a program."""

from abc import ABC, abstractmethod
from typing import ClassVar

from schemas.job import Case, JobSpec
from worker.sandbox.base import Program


class Tool(ABC):
    """One way to execute something in a sandbox."""

    name: ClassVar[str]

    @abstractmethod
    def program(self, spec: JobSpec, case: Case | None) -> Program:
        """The program of a job, given the input of one case, or of the job itself."""
