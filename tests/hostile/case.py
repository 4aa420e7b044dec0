"""The form of a case: one TOML file with the program and the result that is expected. See README.md."""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from evalpool.schemas import Case, JobSpec, Limits, Result, Verdict

HERE = Path(__file__).parent


class Step(BaseModel):
    """One program and its expectations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # -- the job: fields of JobSpec, and two ways to make them large -------------------------------
    code: str
    repeat: int = 1
    """The code is this many copies of `code`."""
    tool: str = "python_executor"
    check: str | None = None
    entry_point: str | None = None
    stdin: str = ""
    stdin_repeat: int = 1
    args: tuple[str, ...] = ()
    args_repeat: int = 1
    """Each argument is this many copies of itself."""
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    probe: bool = False
    """Whether `probe.py` is put beside the program, for raw system calls and attempts that must fail."""
    cases: tuple[Case, ...] = ()
    cases_repeat: int = 1
    """The cases are this many copies of `cases`."""
    stop_early: bool = True
    limits: dict[str, Any] = {}
    """The limits; by default 2 s of CPU and 10 s of wall time. A program that must reach its memory limit has ten times
    as much, since touching memory for the first time can take seconds of CPU."""

    # -- what must come out ------------------------------------------------------------------------
    expect: tuple[Verdict, ...] = Field(min_length=1)
    """The verdicts that are allowed."""
    stdout: str | None = None
    """The whole of standard output."""
    stdout_has: tuple[str, ...] = ()
    stdout_lacks: tuple[str, ...] = ()
    stderr_has: tuple[str, ...] = ()
    stderr_lacks: tuple[str, ...] = ()
    detail_has: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: int | None = None
    oom: bool | None = None
    truncated: bool | None = None
    """Whether either stream is truncated."""
    cpu_at_least: float = 0
    cpu_at_most: float = float("inf")
    wall_at_most: float = float("inf")
    memory_at_least_mib: int = 0
    memory_at_most_mib: float = float("inf")
    processes_at_least: int = 0

    def spec(self, **more: Any) -> JobSpec:
        """Return the job."""
        files = dict(self.files)
        if self.probe:
            files["probe.py"] = (HERE / "probe.py").read_text()
        given = {
            "code": self.code * self.repeat,
            "tool": self.tool,
            "check": self.check,
            "entry_point": self.entry_point,
            "stdin": self.stdin * self.stdin_repeat,
            "args": tuple(each * self.args_repeat for each in self.args),
            "env": self.env,
            "files": files,
            "cases": self.cases * self.cases_repeat,
            "stop_early": self.stop_early,
            "limits": self.allowed,
        }
        return JobSpec(**given | more)

    @property
    def allowed(self) -> Limits:
        """The limits of the job."""
        patience = 10 if Verdict.MEMORY_LIMIT in self.expect and Verdict.TIME_LIMIT not in self.expect else 1
        return Limits(**{"cpu_seconds": 2 * patience, "wall_seconds": 10 * patience} | self.limits)

    def problems(self, result: Result) -> list[str]:
        """Return a sentence for each expectation that the result does not meet."""
        metrics = result.metrics
        found = {
            f"verdict {result.verdict}, not one of {', '.join(self.expect)}": result.verdict not in self.expect,
            f"stdout is not {self.stdout!r:.200}": self.stdout is not None and result.stdout != self.stdout,
            f"exit code {result.exit_code}": self.exit_code is not None and result.exit_code != self.exit_code,
            f"signal {result.signal}": self.signal is not None and result.signal != self.signal,
            f"oom_killed {metrics.oom_killed}": self.oom is not None and metrics.oom_killed != self.oom,
            "truncated or not": self.truncated is not None
            and self.truncated != (result.stdout_truncated or result.stderr_truncated),
            f"CPU {metrics.cpu_seconds}": not self.cpu_at_least <= metrics.cpu_seconds <= self.cpu_at_most,
            f"wall {metrics.wall_seconds}": metrics.wall_seconds > self.wall_at_most,
            f"memory {metrics.peak_memory_bytes >> 20} MiB": not (
                self.memory_at_least_mib << 20 <= metrics.peak_memory_bytes <= self.memory_at_most_mib * (1 << 20)
            ),
            f"{metrics.processes_peak} processes": metrics.processes_peak < self.processes_at_least,
        }
        found |= {f"stdout lacks {part!r}": part not in result.stdout for part in self.stdout_has}
        found |= {f"stdout has {part!r}": part in result.stdout for part in self.stdout_lacks}
        found |= {f"stderr lacks {part!r}": part not in result.stderr for part in self.stderr_has}
        found |= {f"stderr has {part!r}": part in result.stderr for part in self.stderr_lacks}
        found |= {f"detail lacks {part!r}": part not in result.detail for part in self.detail_has}
        return [problem for problem, holds in found.items() if holds]


class HostileCase(Step):
    """A step with a name, and the steps that follow it in the same sandbox."""

    id: str
    """The name of its file."""
    number: int
    """The row in the table of hostile cases; numbers from 101 on are attacks on this design."""
    name: str
    fast: bool = False
    """Whether the case is in the daily subset, which is also run on fresh sandboxes and in cold interpreters."""
    agent_may_die: bool = False
    """Whether the kernel may kill the agent, too: memory in files or sockets is given back last by a dying program. The
    verdict must be right all the same."""
    then: tuple[Step, ...] = ()
    until: Step | None = None
    """A step that is repeated before the case, until it gets what it expects; for cases that need a sandbox of a kind
    that is started only on demand."""


def load() -> list[HostileCase]:
    """Return every case, in the order of the file names."""
    files = sorted((HERE / "cases").glob("*.toml"))
    return [HostileCase(id=file.stem, **tomllib.loads(file.read_text())) for file in files]
