"""From the outcome of a run to its verdict. The functions are pure: they read no clock, and have no side effects.

The questions are asked in the order of certainty. An invalid program has not run, so nothing else is asked about it.
What the kernel or the agent *did* (a limit ended the program) comes before what the program *left* (an exit code), and
its output comes last. A program can choose its exit code and its output, but not its CPU time. The notes of the harness
only ever decide between two kinds of failure.
"""

import codecs
import os
import re
import signal
import subprocess
import sys
from typing import NamedTuple

from evalpool.schemas.errors import SandboxLost
from evalpool.schemas.job import Case, JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.result import CaseResult, Metrics
from evalpool.schemas.verdict import Verdict
from evalpool.worker.judge import comparators
from evalpool.worker.sandbox.base import End, Note, Outcome
from evalpool.worker.tools.languages import COMPILE, LANGUAGES, unpacked

SIGNS = (
    re.compile(r"^(Exception in thread \"[^\"]*\" |Unhandled Exception:|\*\* \()?[\w.$]*(Error|Exception)\b"),
    re.compile(r"\b(error|panicked|panic|fatal)\b|\(\w*(Error|Exception)\)", re.IGNORECASE),
)
"""Patterns of a line that names an error, the surer one first, as some runtimes quote the program before it."""
SMALL = 1 << 14
"""Up to this many bytes are judged on the event loop; larger outcomes are judged in a thread."""
PIECE = 1 << 20
"""Bytes that are decoded in one step, during which no other thread runs. Much smaller steps would fragment the heap."""

LAST = 500
"""Bytes at the end of an output in which the last words of a test runner are searched."""
MESSAGES = 1 << 16
"""Bytes of a compiler's messages in which the first error is searched."""
NO_ROOM = (b"No space left on device", b"File size limit exceeded")
"""Messages of an assembler or a linker about a program whose static data is too large."""
UNKNOWN = (126, 127)
"""Exit codes of a shell that could not start a command."""


class Judgement(NamedTuple):
    """The verdict on one run, and the sentence that explains it."""

    verdict: Verdict
    detail: str


def judge(outcome: Outcome, spec: JobSpec, case: Case | None) -> Judgement:
    """Judge one run. A case with a checker passes here, as only the checker can judge its output."""
    questions = (_invalid, _limit_reached, _check_failed, _ended_early, _differs)
    answers = (ask(outcome, spec, case) for ask in questions)
    return next((answer for answer in answers if answer is not None), Judgement(Verdict.PASSED, "passed"))


def _invalid(outcome: Outcome, spec: JobSpec, case: Case | None) -> Judgement | None:
    """Asked before the limits, since a compiler may quote a line of ten megabytes."""
    if outcome.note is not Note.SYNTAX:
        return None
    return Judgement(Verdict.COMPILE_ERROR, _last_line(outcome.stderr) or "the program is not valid Python")


def _limit_reached(outcome: Outcome, spec: JobSpec, case: Case | None) -> Judgement | None:
    limits, failed = spec.limits, not _ended_well(outcome)
    out_of_memory = LANGUAGES[spec.runs].out_of_memory
    if max(outcome.stdout_total, outcome.stderr_total) > limits.output_bytes:
        detail = f"the program wrote more than {limits.output_bytes:,} bytes to one stream"
        return Judgement(Verdict.OUTPUT_LIMIT, detail)
    if failed and outcome.oom_kills:
        detail = f"the kernel ended the program at its memory limit of {limits.memory_mib} MiB"
        return Judgement(Verdict.MEMORY_LIMIT, detail)
    if failed and (outcome.note is Note.MEMORY or (out_of_memory and out_of_memory in outcome.stderr)):
        return Judgement(Verdict.MEMORY_LIMIT, f"an allocation failed at the memory limit of {limits.memory_mib} MiB")
    used = f"{outcome.cpu_seconds:.2f} s of CPU time"
    if outcome.ended is End.CPU or outcome.cpu_seconds >= limits.cpu_seconds:
        return Judgement(Verdict.TIME_LIMIT, f"the program used {used}; its limit is {limits.cpu_seconds:g} s")
    if outcome.ended is End.WALL:
        detail = f"the program did not end within {limits.wall:g} s of wall time; it used only {used}"
        return Judgement(Verdict.TIME_LIMIT, detail)
    return None


def _check_failed(outcome: Outcome, spec: JobSpec, case: Case | None) -> Judgement | None:
    if outcome.note is Note.ASSERTION:
        return Judgement(Verdict.WRONG_ANSWER, _last_line(outcome.stderr) or "an assertion of the check failed")
    if outcome.note is Note.TAMPERED:
        detail = "the program replaced a function that its check calls while the check ran"
        return Judgement(Verdict.WRONG_ANSWER, detail)
    return None


def _ended_early(outcome: Outcome, spec: JobSpec, case: Case | None) -> Judgement | None:
    """Whether the program ended by a signal, with an error, or before what was asked of it."""
    code = outcome.exit_code
    if outcome.signal is not None:
        detail = f"the program was ended by signal {outcome.signal} ({_signal_name(outcome.signal)})"
        return Judgement(Verdict.RUNTIME_ERROR, detail)
    if spec.check is not None and not outcome.checked and not (outcome.note is Note.RAISED and code):
        detail = f"the program ended with exit code {code} before its check had run to the end"
        return Judgement(Verdict.EARLY_EXIT, detail)
    if code != 0:
        error = _last_line(outcome.stderr) if spec.runs == "python" else _error_line(outcome.stderr)
        return Judgement(Verdict.RUNTIME_ERROR, f"exit code {code}" + (f": {error}" if error else ""))
    words = LANGUAGES[spec.runs].last_words
    if words is not None and not words.search(outcome.stdout[-LAST:]):
        return Judgement(Verdict.EARLY_EXIT, "the program ended with exit code 0 before its tests had finished")
    return None


def _differs(outcome: Outcome, spec: JobSpec, case: Case | None) -> Judgement | None:
    if case is None or case.comparator == "checker":
        return None
    difference = _difference(case.comparator, outcome.stdout, case.expected)
    return Judgement(Verdict.WRONG_ANSWER, difference) if difference else None


def is_small(outcome: Outcome, case: Case | None) -> bool:
    """Whether judging this outcome takes next to no time."""
    expected = 0 if case is None else len(case.expected)
    return len(outcome.stdout) + len(outcome.stderr) + expected <= SMALL


def case_result(index: int, outcome: Outcome, spec: JobSpec, case: Case | None) -> CaseResult:
    """Return one run as it is stored: with its verdict, and with texts that any database takes."""
    judgement = judge(outcome, spec, case)
    return CaseResult(
        index=index,
        verdict=judgement.verdict,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        stdout=text(outcome.stdout),
        stderr=text(outcome.stderr),
        stdout_truncated=outcome.stdout_total > len(outcome.stdout),
        stderr_truncated=outcome.stderr_total > len(outcome.stderr),
        detail=judgement.detail,
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


def compile_error(outcome: Outcome, limits: Limits) -> CaseResult | None:
    """Return the result of a program that does not compile, or that is too large to be run; `None` for any other."""
    verdict, size = Verdict.COMPILE_ERROR, unpacked(outcome.stdout) >> 20
    if _ended_well(outcome):
        if size <= limits.memory_mib * 3 // 4:  # in which a sandbox has room for files
            return None
        verdict = Verdict.MEMORY_LIMIT
        detail = f"the compiled program, with its static data, takes {size} MiB of disk space, which counts as memory"
    else:
        detail = _compiler_failure(outcome)
    return CaseResult(
        index=0,
        verdict=verdict,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        stderr=text(outcome.stderr),
        stderr_truncated=outcome.stderr_total > len(outcome.stderr),
        detail=detail,
        metrics=_metrics(outcome, COMPILE),
    )


def _compiler_failure(outcome: Outcome) -> str:
    """Return the sentence that says why a compiler failed."""
    errors = (line for line in text(outcome.stderr[:MESSAGES]).splitlines() if "error" in line.lower())
    message = _printable(next(errors, "")) or _last_line(outcome.stderr)
    if outcome.ended is not End.ITSELF:
        reason = f"the compiler was stopped at its {outcome.ended} limit"
    elif outcome.oom_kills or any(sign in outcome.stderr for sign in NO_ROOM):
        reason = "the program, perhaps its static data, is too large for the compiler's memory"
    else:
        return message or f"the compiler ended with exit code {outcome.exit_code}"
    return f"{reason}: {message}" if message else reason


def syntax_error(outcome: Outcome, limits: Limits) -> CaseResult | None:
    """Return the result of a program in whose text its interpreter found a syntax error; `None` if it found none."""
    found = outcome.exit_code and outcome.exit_code not in UNKNOWN and not outcome.abnormal
    return compile_error(outcome, limits) if found else None


def text(data: bytes) -> str:
    """Return what a program wrote as valid text without NUL characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts = range(0, len(data), PIECE)
    pieces = [decoder.decode(data[start : start + PIECE]).replace("\0", "\ufffd") for start in starts]
    return "".join([*pieces, decoder.decode(b"", final=True)])


def _difference(comparator: str, got: bytes, expected: str) -> str:
    """Return how the output differs from the expected one, or nothing if they agree. Large texts are compared in a
    process of their own, since each step of the comparison would keep all other threads of this one waiting."""
    if comparators.surely(comparator, got, expected):
        return ""
    if len(got) + len(expected) <= SMALL:
        return comparators.difference(comparator, got, expected)
    command = [sys.executable, "-I", "-S", comparators.__file__, comparator, str(len(got))]
    with os.fdopen(os.memfd_create("output"), "r+b") as file:
        file.write(got)
        file.write(expected.encode())
        file.seek(0)
        done = subprocess.run(command, stdin=file, capture_output=True, check=False)
    if done.returncode:
        raise SandboxLost(f"the comparison ended with exit code {done.returncode}: {_last_line(done.stderr)}")
    return done.stdout.decode()


def one_line(data: bytes) -> str:
    """Return the beginning of an output as one line that may go into logs."""
    return _printable(" ".join(text(data[:2000]).split()))


def _share(outcome: Outcome, limits: Limits) -> float:
    return max(
        outcome.cpu_seconds / limits.cpu_seconds,
        outcome.wall_seconds / limits.wall,
        outcome.memory_bytes / (limits.memory_mib << 20),
    )


def _ended_well(outcome: Outcome) -> bool:
    """Whether a program did what was asked, even if it lost a child to the kernel or caught a MemoryError."""
    return outcome.ended is End.ITSELF and outcome.exit_code == 0


def _last_line(stderr: bytes) -> str:
    lines = text(stderr[-2000:]).strip().splitlines()
    return _printable(lines[-1]) if lines else ""


def _error_line(stderr: bytes) -> str:
    """Return the line in which a runtime names the error. A stack trace or advice may follow it."""
    lines = text(stderr[:4000]).splitlines()
    found = (line for sign in SIGNS for line in lines if sign.search(line))
    return _printable(next(found, "")) or _last_line(stderr)


def _printable(line: str) -> str:
    """Return the beginning of a line with printable characters only, as it goes into logs."""
    return "".join(character if character.isprintable() else "\ufffd" for character in line.strip()[:300])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
