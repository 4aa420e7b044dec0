"""Every labelled program of a data folder, through the whole stack, against its label: `make verify DATA=folder`.

Prints the agreement per set, and every disagreement with what was said about it. Exit code 0: each set agrees as much
as it must.
"""

import argparse
import gzip
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT)  # instead of tests/, whose folders have the names of our packages

from rich.box import ROUNDED  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from evalpool.api import formats, submit_batch  # noqa: E402
from evalpool.api.embedded import Servers, embedded  # noqa: E402
from evalpool.schemas import Case, InvalidJob, JobSpec, Limits, Verdict  # noqa: E402
from evalpool.schemas.settings import Settings  # noqa: E402

PASSED = frozenset({Verdict.PASSED})
FAILED = frozenset(verdict for verdict in Verdict if verdict.scored) - PASSED
WORDS = {"accepted": PASSED, "rejected": frozenset({Verdict.EARLY_EXIT, Verdict.WRONG_ANSWER})}
"""What the judges' cases allow, where they do not use our own words."""
EXPLAINED = {
    "Go/95#canonical": "it looks at two keys of a map, in random order: without a sandbox, 45 of 200 runs fail, too",
    "HumanEval/32": "OriginFmt's test unpacks a float (_poly(*candidate(*inp), inp)): it fails under python3, too",
    "p3:FivePowers:0:0": "Python 3.11 refuses to convert integers of more than 4,300 digits",
    "p3:BoxVolume:1:0": "Python 3.11 refuses to convert integers of more than 4,300 digits",
    "trampgeek/jobe::Valid Python3/pylint program": "no pylint in the image",
    "trampgeek/jobe::Testing use of interpreter args with Python3": "a job cannot choose the interpreter's arguments",
    "trampgeek/jobe::Test use of compileargs with C": "a job cannot choose the compiler's arguments",
    "trampgeek/jobe::Memory limit exceeded in C (seg faults)": "memory is what a program uses, not what it reserves",
    "trampgeek/jobe::Infinite recursion (stack error) on C": "with -O2 gcc makes an endless loop of it",
    "trampgeek/jobe::A C program with ASCII non-UTF-8-compatible output": "Jobe shows such bytes as text, like \\xc0",
    "bigcode-project/bigcode-evaluation-harness::fork_bomb.py": "whether the tracebacks of all its children are more "
    "than its 1,024 bytes of output is chance",
    "engineer-man/piston::file_persistance.py": "/run/lock is read-only, so nothing persists there",
    "bytedance/SandboxFusion::test_python_syntax_error": "a syntax error is compile_error here",
    "bytedance/SandboxFusion::test_bash_syntax_error": "a syntax error is compile_error here",
    "trampgeek/jobe::Syntactically invalid Nodejs": "a syntax error is compile_error here",
    "bytedance/SandboxFusion::test_python_fetch_files": "/mnt does not exist",
    "bytedance/SandboxFusion::test_csharp_stdin": "it lacks `using System`; Mono's compiler does not supply it",
    "bytedance/SandboxFusion::test_typescript_humanevalx_assertion_error": "tsc refuses 1 === 2, which is never true",
    "bytedance/SandboxFusion::antihack CPP_CODE_1": "a check behind the program is for Python; others have cases",
    "bytedance/SandboxFusion::isolation_network_server_127": "no requests in the image",
    "bytedance/SandboxFusion::isolation_network_server_port_conflict": "no requests in the image",
}
"""Disagreements that are understood, and why we keep to them. They are shown, and do not count against a set."""
GO_PACKAGES = (
    "bytes", "crypto/md5", "fmt", "math", "math/rand", "regexp", "sort", "strconv", "strings", "testing", "time",
    "github.com/stretchr/testify/assert",
)  # fmt: skip
"""What programs of HumanEvalPack import."""
notes = Console(stderr=True, highlight=False)

Labelled = tuple[str, JobSpec, frozenset[Verdict]]
"""A name, a program, and the verdicts that agree with its label."""


@dataclass(frozen=True)
class Set:
    """Programs with labels."""

    file: str
    needed: float
    """Share that must agree."""
    read: Callable[[Path], Iterator[Labelled | str]]
    """Its programs; and, as text, what cannot be run and why."""


def labelled(path: Path) -> Iterator[Labelled | str]:
    """Self-contained programs: exit code 0 is a pass."""
    for row in rows(path):
        try:
            spec = JobSpec(
                code=row["code"], stdin=row.get("stdin") or "", task_id=row["id"],
                **in_language(row["language"]), limits=Limits(cpu_seconds=8, memory_mib=1024),
            )  # fmt: skip
        except InvalidJob as error:
            yield f"{row['id']}: {error}"
            continue
        yield row["id"], spec, PASSED if row["expect"] == "pass" else FAILED


def judge(path: Path) -> Iterator[Labelled | str]:
    """Cases of other judges, with their limits."""
    for row in rows(path):
        ours = {"cpu_s": "cpu_seconds", "wall_s": "wall_seconds", "memory_mb": "memory_mib", "procs": "processes"}
        limits = {ours.get(name, name): value for name, value in row["norm_limits"].items()}
        if "memory_mib" in limits:
            limits["memory_mib"] = round(limits["memory_mib"])
        expected, given = row["expected_stdout"], {"stdin": row["stdin"], "args": row["args"]}
        more: dict[str, Any] = {"cases": [Case(expected=expected, comparator="tokens", **given)]} if expected else given
        if "antihack" in row["tags"] and row["language"] == "python":
            more["check"] = "assert True"  # to be cheated out of
        try:
            spec = JobSpec(
                code=row["code"], files=row["files"], limits=Limits(**limits), **in_language(row["language"]), **more
            )
        except InvalidJob as error:
            yield f"{row['id']}: {error}"
            continue
        yield row["id"], spec, frozenset().union(*(WORDS.get(word) or {Verdict(word)} for word in row["expect"]))


def pack(path: Path) -> Iterator[Labelled | str]:
    """HumanEvalPack's problems in Go and Rust, whose tests are functions of a test framework: each solution passes, and
    each one with a bug fails. The imports are ours: those that it uses."""
    assemble = {"Go": in_go, "Rust": in_rust}
    for row in rows(path):
        for kind, allowed in (("canonical", PASSED), ("buggy", FAILED)):
            name, language = f"{row['task_id']}#{kind}", row["task_id"].partition("/")[0]
            code, needed = assemble[language](row, row[f"{kind}_solution"])
            if needed:
                yield f"{name}: its tests need the {needed} from outside"
            else:
                limits = Limits(cpu_seconds=8, memory_mib=1024)
                yield name, JobSpec(code=code, limits=limits, **in_language(f"{language.lower()}_test")), allowed


def in_go(row: dict[str, Any], solution: str) -> tuple[str, str]:
    """A Go package with its test. What the data say about imports is not always so: those are right that it uses."""
    code = f"{row['prompt'].removeprefix(row['import'])}{solution}\n{row['test']}"
    used = set(re.findall(r"\b([a-z0-9]+)\.", re.sub(r"//.*", "", code)))
    imports = "".join(f'"{path}"\n' for path in GO_PACKAGES if path.rpartition("/")[2] in used)
    return f"package main\nimport (\n{imports})\n{code}", ""


def in_rust(row: dict[str, Any], solution: str) -> tuple[str, str]:
    """A Rust crate with its test, and the other crate that it needs. Every prompt imports all three, used or not."""
    crates = {"use rand::Rng;": r"\brand::", "use regex::Regex;": r"\bRegex\b", "use md5;": r"\bmd5::"}
    prompt = row["prompt"]
    for line in crates:
        prompt = prompt.replace(line, "")
    code = prompt + solution + row["test"]
    used = " and ".join(
        line.removeprefix("use ").partition(":")[0].rstrip(";")
        for line, sign in crates.items()
        if re.search(sign, prompt + row["canonical_solution"] + row["test"])
    )
    return code, f"crate {used}" if used else ""


def references(name: str) -> Callable[[Path], Iterator[Labelled | str]]:
    """The reference solutions of a benchmark's problems, as this format would run them, with time to spare."""

    def read(path: Path) -> Iterator[Labelled | str]:
        with formats.read(str(path), name, str(path), {"cpu_seconds": 30, "memory_mib": 1024}) as data:
            for spec in data.references():
                yield str(spec.task_id), spec, PASSED

    return read


SETS = (
    Set("problems/HumanEval.jsonl.gz", 1.0, references("humaneval")),
    Set("problems/HumanEvalPlus-OriginFmt.jsonl.gz", 1.0, references("evalplus")),
    Set("problems/mbpp.jsonl.gz", 1.0, references("mbpp")),
    Set("problems/sanitized-mbpp.json.gz", 1.0, references("mbpp")),
    Set("labelled/humaneval-mbpp-reference.jsonl.gz", 1.0, labelled),
    Set("labelled/humanevalpack.jsonl.gz", 1.0, labelled),
    Set("problems/humanevalpack_go.jsonl.gz", 1.0, pack),
    Set("problems/humanevalpack_rust.jsonl.gz", 1.0, pack),
    Set("labelled/mapcoder.jsonl.gz", 0.995, labelled),
    Set("labelled/cruxeval.jsonl.gz", 0.999, labelled),
    Set("labelled/p3.jsonl.gz", 0.995, labelled),
    Set("judge/cases.jsonl.gz", 1.0, judge),
)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def in_language(name: str) -> dict[str, str]:
    return {} if name == "python" else {"tool": "multi_code_executor", "language": name}


@contextmanager
def stack() -> Iterator[Servers]:
    """A Redis, a ledger and a worker of this run's own."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["EVALPOOL_STATE_DIR"] = place
        with embedded(Settings()) as servers:
            servers.start_worker()
            yield servers


def main() -> int:
    """Run them all."""
    options = argparse.ArgumentParser(prog="make verify")
    options.add_argument("data", type=Path, help="the folder with problems/, labelled/ and judge/")
    options.add_argument("--only", default="", help="sets whose name contains this")
    given = options.parse_args()
    chosen = [each for each in SETS if given.only in each.file and (given.data / each.file).exists()]
    if not chosen:
        notes.print(f"{given.data}: no labelled set in it that is called so")
        return 2
    table = Table("set", "programs", "agree", "explained", "share", "needed", "not run", "jobs/s", box=ROUNDED)
    fine = True
    with stack() as servers:
        for each in chosen:
            fine &= verify(each, list(each.read(given.data / each.file)), table, servers)
    Console(width=120).print(table)
    return 0 if fine else 1


def verify(each: Set, found: Iterable[Labelled | str], table: Table, servers: Servers) -> bool:
    """One set; whether enough of it agrees."""
    programs = [one for one in found if not isinstance(one, str)]
    left_out = [one for one in found if isinstance(one, str)]
    notes.print(f"{each.file}: {len(programs):,} programs")
    started, agree, explained = time.monotonic(), 0, 0
    total, right = Counter[str](), Counter[str]()
    if programs:
        batch = submit_batch([spec for _, spec, _ in programs])
        for _ in batch.watch():
            servers.check()
        for (name, spec, allowed), result in zip(programs, batch.stream(), strict=True):
            agree += result.verdict in allowed
            total[spec.runs] += 1
            right[spec.runs] += result.verdict in allowed
            if result.verdict not in allowed:
                explained += name in EXPLAINED
                wanted = " or ".join(sorted(allowed)) if len(allowed) < len(FAILED) else "a failure"
                why = EXPLAINED.get(name, "NOT EXPLAINED")
                notes.print(f"  {name}: {result.verdict}, not {wanted}: {result.detail[:200]} [{why}]", markup=False)
    if len(total) > 1:
        notes.print("  " + ", ".join(f"{name}: {right[name]:,} of {total[name]:,}" for name in sorted(total)))
    share = agree / len(programs) if programs else 0.0
    fine = bool(programs) and (agree + explained) / len(programs) >= each.needed
    rate = len(programs) / (time.monotonic() - started)
    for reason in sorted({text.partition(": ")[2] for text in left_out}):
        notes.print(f"  not run: {sum(reason in text for text in left_out)} ({reason})", markup=False)
    table.add_row(
        each.file, f"{len(programs):,}", f"{agree:,}", f"{explained}", f"{share:.3%}", f"{each.needed:.1%}",
        f"{len(left_out):,}", f"{rate:.0f}", style="" if fine else "bold red",
    )  # fmt: skip
    return fine


if __name__ == "__main__":
    sys.exit(main())
