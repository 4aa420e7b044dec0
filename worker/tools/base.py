"""A tool turns a job into runs of a program."""

from abc import ABC, abstractmethod
from typing import ClassVar

from schemas.job import Case, JobSpec
from worker.sandbox.base import Program


class Tool(ABC):
    """One way to execute something in a sandbox."""

    name: ClassVar[str]

    @abstractmethod
    def program(self, spec: JobSpec, case: Case | None, compiled: bytes | None = None) -> Program:
        """The program of a job, given the input of one case, or of the job itself; and what was compiled, if it is."""

    def compiler(self, spec: JobSpec) -> Program | None:
        """What must be run once before it, and writes what is to be run to its standard output; nothing for most."""
        return None
