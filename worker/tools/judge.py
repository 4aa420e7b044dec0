"""From what a program did to one word for it. Pure: no clock, no input, no output.

The order of the questions is the order of certainty. A program that never began is asked no more. What the kernel or
the agent *did* (a limit that ended the program) comes before what the program *left* (an exit code), and only then
comes what was asked of it. A program can choose its exit code and its output; it cannot choose its CPU time. The
interpreter's own notes only ever choose between two ways of having failed.
"""

import re
import signal

from schemas.job import Case, JobSpec
from schemas.limits import Limits
from schemas.result import CaseResult, Metrics
from schemas.verdict import Verdict
from worker.sandbox.base import Outcome
from worker.tools.comparators import agrees
from worker.tools.languages import COMPILE, LANGUAGES

SIGNS = (
    re.compile(r"^(Exception in thread \"[^\"]*\" |Unhandled Exception:|\*\* \()?[\w.$]*(Error|Exception)\b"),
    re.compile(r"\b(error|panicked|panic|fatal)\b|\(\w*(Error|Exception)\)", re.IGNORECASE),
)
"""Of a line that names an error, the surer one first; some runtimes quote the program before it."""


def judge(outcome: Outcome, spec: JobSpec, case: Case | None) -> tuple[Verdict, str]:
    """The verdict on one run, and a sentence that explains it."""
    if outcome.said == "syntax":  # before the limits: a compiler may quote a line of ten megabytes
        return Verdict.COMPILE_ERROR, _last_line(outcome.stderr) or "the program is not valid Python"
    stopped = _limit_reached(outcome, spec.limits, LANGUAGES[spec.runs].out_of_memory)
    if stopped is not None:
        return stopped
    if outcome.said == "assertion":
        return Verdict.WRONG_ANSWER, _last_line(outcome.stderr) or "an assertion of the check failed"
    if outcome.said == "tampered":
        return Verdict.WRONG_ANSWER, "it replaced a function that its check calls, while the check ran"
    if outcome.signal is not None:
        return Verdict.RUNTIME_ERROR, f"ended by signal {outcome.signal} ({_signal_name(outcome.signal)})"
    if spec.check is not None and not outcome.checked and not (outcome.said == "raised" and outcome.exit_code):
        return Verdict.EARLY_EXIT, f"ended with exit code {outcome.exit_code} before its check had run to the end"
    if outcome.exit_code != 0:
        said = _last_line(outcome.stderr) if spec.runs == "python" else _telling_line(outcome.stderr)
        return Verdict.RUNTIME_ERROR, f"exit code {outcome.exit_code}" + (f": {said}" if said else "")
    if LANGUAGES[spec.runs].last_words not in outcome.stdout:
        return Verdict.EARLY_EXIT, "ended with exit code 0 before its tests had come to their end"
    if case is not None and case.comparator == "checker":  # whose word is still to come
        return Verdict.PASSED, "passed"
    if case is not None and not agrees(case.comparator, outcome.stdout, case.expected):
        return Verdict.WRONG_ANSWER, f"the output differs from what was expected (comparator {case.comparator})"
    return Verdict.PASSED, "passed"


def case_result(index: int, outcome: Outcome, spec: JobSpec, case: Case | None) -> CaseResult:
    """One run as it is stored: judged, its text made fit for any database."""
    verdict, detail = judge(outcome, spec, case)
    return CaseResult(
        index=index,
        verdict=verdict,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        stdout=text(outcome.stdout),
        stderr=text(outcome.stderr),
        stdout_truncated=outcome.stdout_total > len(outcome.stdout),
        stderr_truncated=outcome.stderr_total > len(outcome.stderr),
        detail=detail,
        metrics=_metrics(outcome, spec.limits),
    )


def _metrics(outcome: Outcome, limits: Limits) -> Metrics:
    return Metrics(
        wall_seconds=outcome.wall_seconds,
        cpu_seconds=outcome.cpu_seconds,
        peak_memory_bytes=outcome.memory_bytes,
        oom_killed=outcome.oom_kills > 0,
        processes_peak=outcome.processes,
        output_bytes=outcome.stdout_total + outcome.stderr_total,
        limit_share=_share(outcome, limits),
    )


def compiled(outcome: Outcome) -> CaseResult | None:
    """What a compiler that failed had to say; nothing about one that did not."""
    if _ended_well(outcome):
        return None
    said = text(outcome.stderr)
    errors = (_printable(line) for line in said.splitlines() if "error" in line.lower())
    words = next(errors, "") or _last_line(outcome.stderr)
    if outcome.ended != "itself":
        words = f"the compiler was stopped at its limit ({outcome.ended}); {words}"
    return CaseResult(
        index=0,
        verdict=Verdict.COMPILE_ERROR,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        stderr=said,
        stderr_truncated=outcome.stderr_total > len(outcome.stderr),
        detail=words or f"the compiler ended with exit code {outcome.exit_code}",
        metrics=_metrics(outcome, COMPILE),
    )


def text(data: bytes) -> str:
    """Valid UTF-8 without NUL, whatever the program wrote."""
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


def _limit_reached(outcome: Outcome, limits: Limits, gone: bytes) -> tuple[Verdict, str] | None:
    if max(outcome.stdout_total, outcome.stderr_total) > limits.output_bytes:
        return Verdict.OUTPUT_LIMIT, f"wrote more than {limits.output_bytes:,} bytes to one stream"
    if outcome.oom_kills and not _ended_well(outcome):
        return Verdict.MEMORY_LIMIT, f"ended by the kernel at {limits.memory_mib} MiB"
    if (outcome.said == "memory" or (gone and gone in outcome.stderr)) and not _ended_well(outcome):
        return Verdict.MEMORY_LIMIT, f"an allocation failed under the limit of {limits.memory_mib} MiB"
    if outcome.ended == "cpu" or outcome.cpu_seconds >= limits.cpu_seconds:
        return Verdict.TIME_LIMIT, f"used {outcome.cpu_seconds:.2f} s of CPU; the limit is {limits.cpu_seconds:g} s"
    if outcome.ended == "wall":
        used = f"only {outcome.cpu_seconds:.2f} s of CPU used"
        return Verdict.TIME_LIMIT, f"did not end within {limits.wall:g} s of wall time ({used})"
    return None


def _share(outcome: Outcome, limits: Limits) -> float:
    return max(
        outcome.cpu_seconds / limits.cpu_seconds,
        outcome.wall_seconds / limits.wall,
        outcome.memory_bytes / (limits.memory_mib << 20),
    )


def _ended_well(outcome: Outcome) -> bool:
    """A program may lose a child to the kernel, or catch a MemoryError, and still do what was asked."""
    return outcome.ended == "itself" and outcome.exit_code == 0


def _last_line(stderr: bytes) -> str:
    lines = text(stderr[-2000:]).strip().splitlines()
    return _printable(lines[-1]) if lines else ""


def _telling_line(stderr: bytes) -> str:
    """Where a runtime names the error; behind it may come where that was, or advice."""
    lines = text(stderr[:4000]).splitlines()
    found = (line for sign in SIGNS for line in lines if sign.search(line))
    return _printable(next(found, "")) or _last_line(stderr)


def _printable(line: str) -> str:
    """The beginning of a line that goes into logs."""
    return "".join(character if character.isprintable() else "\ufffd" for character in line.strip()[:300])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
