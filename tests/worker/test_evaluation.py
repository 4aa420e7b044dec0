"""One job on a fake sandbox: functions that are called, checkers, and programs that others kept from running."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from schemas import Case, JobSpec, Limits, Settings, Verdict
from schemas.errors import CheckerFailed, SandboxLost, SetupError
from schemas.job import LANGUAGES as NAMES
from schemas.job import SPELLINGS
from schemas.lease import Lease
from worker.artifacts import Artifacts
from worker.evaluation import evaluate
from worker.pool import Pool
from worker.sandbox.base import Outcome, Program, Shape
from worker.sandbox.fake import FakeSandbox
from worker.tools import code
from worker.tools.languages import LANGUAGES, SCANNED, Language, classes


class Watched(FakeSandbox):
    """Notes what runs. It can pretend that the machine was busy, or that the sandbox was paused at the wall limit."""

    programs: list[Program] = []  # noqa: RUF012 - one list for all, on purpose
    busy: list[float] = []  # noqa: RUF012
    pauses: list[float] = []  # noqa: RUF012 - of the next runs, in seconds
    at_once = most = 0

    async def run(self, program: Program) -> Outcome:
        Watched.programs.append(program)
        Watched.at_once += 1
        Watched.most = max(Watched.most, Watched.at_once)
        try:
            outcome = await super().run(program)
        finally:
            Watched.at_once -= 1
        if Watched.pauses and (paused := Watched.pauses.pop(0)):
            return replace(outcome, ended="wall", exit_code=None, signal=9, paused_seconds=paused)
        starved = outcome.ended == "wall" and Watched.busy
        return replace(outcome, delay_seconds=Watched.busy.pop(0)) if starved else outcome


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Watched.programs, Watched.busy, Watched.pauses, Watched.most = [], [], [], 0


async def run(*specs: JobSpec, slots: int = 2) -> Sequence[Any]:
    """The results of these jobs, side by side."""

    async def make(shape: Shape) -> FakeSandbox:
        sandbox = Watched(shape)
        await sandbox.start()
        return sandbox

    pool, artifacts = Pool(make, slots, 100), Artifacts()
    leases = [
        Lease(job_id=f"b-{n:06}", batch_id="b", spec=spec, attempt=1, created_at=0, started_at=0)
        for n, spec in enumerate(specs)
    ]
    try:
        return await asyncio.gather(*(evaluate(lease, pool, artifacts, Settings()) for lease in leases))
    finally:
        await pool.close()


async def test_a_job_above_the_workers_ceiling_ends_at_once_and_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALPOOL_MAX_PROCESSES", "10")
    refused, ran = await run(JobSpec(code="print(1)"), JobSpec(code="print(2)", limits=Limits(processes=10)))
    assert (refused.verdict, refused.attempt) == (Verdict.SANDBOX_ERROR, 1)
    assert refused.detail == "limits.processes: 64 is more than the 10 that EVALPOOL_MAX_PROCESSES allows"
    assert (ran.verdict, ran.stdout) == (Verdict.PASSED, "2\n")
    assert [program.code for program in Watched.programs] == [b"print(2)"]


async def test_a_function_is_called_and_what_it_prints_is_not_its_answer() -> None:
    code = "def add(a, b):\n    print('noise')\n    return (a + b, [a])\n"
    right = Case(json.dumps([1, 2]), "[3, [1]]", comparator="json")
    wrong = Case(json.dumps([1, 2]), "[4, [1]]", comparator="json")
    spec = JobSpec(code=code, entry_point="add", cases=[right, wrong], stop_early=False)
    (result,) = await run(spec)
    assert [case.verdict for case in result.cases] == [Verdict.PASSED, Verdict.WRONG_ANSWER]
    assert result.comparator == "json/1"
    assert "noise" in result.cases[0].stderr


async def test_a_method_of_solution_gets_its_arguments_back_as_they_were() -> None:
    code = "class Solution:\n    def f(self, table, keep):\n        return sorted(table), list(keep)\n"
    case = Case(json.dumps([{"1": 2, "-3": 4}, {"a": 1}]), '[[-3, 1], ["a"]]', comparator="json:unwrap")
    (result,) = await run(JobSpec(code=code, entry_point="f", cases=[case]))
    assert result.passed, result.stderr


async def test_an_answer_that_is_the_only_element_of_the_expected_one_may_be_enough() -> None:
    code = "def f(): return 7"
    cases = [Case("[]", "[7]", comparator=comparator) for comparator in ("json:unwrap", "json")]
    (result,) = await run(JobSpec(code=code, entry_point="f", cases=cases, stop_early=False))
    assert [case.verdict for case in result.cases] == [Verdict.PASSED, Verdict.WRONG_ANSWER]


CHECKER = """
import sys
given, output, answer = (open(path).read() for path in sys.argv[1:])
if output == "break": raise ValueError("no")
sys.exit(0 if sorted(output.split()) == sorted(answer.split()) else 1)
"""


async def test_a_checker_of_the_jobs_own_decides_where_the_program_never_was() -> None:
    jobs = [
        JobSpec(code=f"print({text!r}, end='')", cases=[Case("", "1 2", comparator="checker")], checker=CHECKER)
        for text in ("2 1", "2 2")
    ]
    accepted, rejected = await run(*jobs)
    assert (accepted.verdict, rejected.verdict) == (Verdict.PASSED, Verdict.WRONG_ANSWER)
    assert accepted.comparator == "checker/1"
    judged = [program for program in Watched.programs if program.files]
    assert {program.code for program in judged} == {CHECKER.encode()}


async def test_a_checker_that_breaks_is_nobodys_wrong_answer() -> None:
    spec = JobSpec(code="print('break', end='')", cases=[Case("", "break", comparator="checker")], checker=CHECKER)
    with pytest.raises(CheckerFailed, match="checker_failed"):
        await run(spec)


async def test_an_output_that_breaks_the_checker_is_the_programs_own_fault() -> None:
    spec = JobSpec(code="print('break', end='')", cases=[Case("", "1", comparator="checker")], checker=CHECKER)
    (result,) = await run(spec)
    assert result.verdict is Verdict.WRONG_ANSWER
    assert "not on the expected one" in result.detail


SLEEPER = "import time; time.sleep(0.6)"


async def test_a_program_that_others_kept_from_running_is_run_again_alone() -> None:
    Watched.busy = [0.2]
    tight = Limits(cpu_seconds=1, wall_seconds=0.3)
    starved, *others = await run(
        JobSpec(code=SLEEPER, limits=tight), *[JobSpec(code="import time; time.sleep(0.1)")] * 6
    )
    assert starved.passed
    assert starved.metrics.rerun
    assert all(result.passed and not result.metrics.rerun for result in others)
    assert [program.patience for program in Watched.programs if program.patience] == [1.2]  # its second run


async def test_a_program_that_only_waits_is_not_given_a_second_chance() -> None:
    (result,) = await run(JobSpec(code=SLEEPER, limits=Limits(cpu_seconds=1, wall_seconds=0.3)))
    assert result.verdict is Verdict.TIME_LIMIT
    assert not result.metrics.rerun
    assert len(Watched.programs) == 1
    assert result.metrics.limit_share >= 1


TIGHT = Limits(cpu_seconds=1, wall_seconds=3)


async def test_a_program_whose_sandbox_was_paused_is_run_again_with_patience() -> None:
    Watched.pauses = [0.6]
    (result,) = await run(JobSpec(code="print(1)", limits=TIGHT))
    assert (result.passed, result.metrics.rerun) == (True, True)
    assert [program.patience for program in Watched.programs] == [0, 12]


async def test_a_pause_is_forgiven_in_every_case_of_a_job() -> None:
    """Unlike a rerun after CPU starvation, this one does not stop the other slots."""
    Watched.pauses = [5, 0] * 3
    (result,) = await run(JobSpec(code="print(input())", cases=[Case(str(n), str(n)) for n in range(3)], limits=TIGHT))
    assert result.passed
    assert len(Watched.programs) == 6


async def test_a_second_run_is_the_last_one_even_if_it_was_paused() -> None:
    Watched.pauses = [5, 11]
    (result,) = await run(JobSpec(code="print(1)", limits=TIGHT))
    assert result.verdict is Verdict.TIME_LIMIT
    assert len(Watched.programs) == 2


async def test_a_second_pause_that_exceeds_the_patience_is_our_failure() -> None:
    Watched.pauses = [5, 13]
    with pytest.raises(SandboxLost, match="paused from outside"):
        await run(JobSpec(code="print(1)", limits=TIGHT))


async def test_a_checker_whose_sandbox_was_paused_is_run_again() -> None:
    Watched.pauses = [0, 5]
    cases = [Case("", "1 2", comparator="checker")]
    (result,) = await run(JobSpec(code="print('2 1', end='')", cases=cases, checker=CHECKER))
    assert result.passed, result.detail


async def test_the_search_for_a_compiler_is_repeated_if_its_sandbox_was_paused(toy: str) -> None:
    Watched.pauses = [5]
    (result,) = await run(compiled_job(toy, "echo 1\n"))
    assert result.passed, result.detail


async def test_alone_means_that_nothing_else_is_lent() -> None:
    async def make(shape: Shape) -> FakeSandbox:
        sandbox = FakeSandbox(shape)
        await sandbox.start()
        return sandbox

    pool = Pool(make, 3, 100)
    shape, inside = Shape("x", 1, 1, 1), 0

    async def use(*, alone: bool) -> None:
        nonlocal inside
        async with pool.lend(shape, alone=alone):
            inside += 1
            assert not alone or inside == 1
            await asyncio.sleep(0.01)
            assert not alone or inside == 1
            inside -= 1

    await asyncio.wait_for(asyncio.gather(*(use(alone=n % 3 == 0) for n in range(12))), 30)
    await pool.close()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """A language whose compiler is `sh`: it refuses what is no valid script."""
    build = "sh -n main.x && { echo '#!/bin/sh'; cat main.x; } > main && chmod +x main"
    monkeypatch.setitem(LANGUAGES, "lua", Language("main.x", ("./main",), build, compiler="sh"))
    return "lua"


def compiled_job(language: str, code: str, cases: int = 0, **more: Any) -> JobSpec:
    asked = [Case(f"{n}\n", f"{n}") for n in range(cases)]
    return JobSpec(code=code, tool="multi_code_executor", language=language, cases=asked, **more)


def compilations() -> int:
    return sum("tar -cf" in " ".join(program.argv) for program in Watched.programs)


async def test_a_program_is_compiled_once_and_run_for_every_case(toy: str) -> None:
    echo = "read x; echo $x\n"
    (result,) = await run(compiled_job(toy, echo, cases=20))
    assert result.passed, result.stderr
    assert (len(result.cases), compilations(), len(Watched.programs)) == (20, 1, 22)  # one to look for the compiler


async def test_a_compiler_that_was_starved_is_run_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "sleep 0.8; printf '#!/bin/sh\\necho made\\n' > main; chmod +x main"
    monkeypatch.setitem(LANGUAGES, "lua", Language("main.x", ("./main",), slow, compiler="sh"))
    monkeypatch.setattr(code, "COMPILE", Limits(cpu_seconds=1, wall_seconds=0.5, output_bytes=1 << 20))
    Watched.busy = [0.4]
    (result,) = await run(compiled_job("lua", ""))
    assert (result.verdict, result.stdout) == (Verdict.PASSED, "made\n")
    assert [program.patience for program in Watched.programs if program.patience] == [2.0]


async def test_an_image_without_the_compiler_is_not_the_programs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LANGUAGES, "lua", Language("main.x", ("./main",), "true", compiler="no-such-compiler"))
    monkeypatch.setitem(LANGUAGES, "ruby", Language("main.x", ("no-such-interpreter", "main.x")))
    for language in ("lua", "ruby"):
        with pytest.raises(SetupError, match="image: evalpool/code:12 has no no-such-"):
            await run(compiled_job(language, ""))


async def test_the_same_source_is_not_compiled_again_and_another_one_is(toy: str) -> None:
    same = [compiled_job(toy, "echo 1\n", args=(str(n),)) for n in range(3)]
    results = await run(*same, compiled_job(toy, "echo 2\n"), compiled_job(toy, "echo 1\n", files={"x": "y"}))
    assert all(result.passed for result in results)
    assert compilations() == 3


async def test_a_compiler_that_refuses_has_its_words_in_the_result(toy: str) -> None:
    refused = compiled_job(toy, "if then error\n", cases=3)
    first, second = await run(refused, refused)
    assert (first.verdict, first.cases) == (Verdict.COMPILE_ERROR, ())
    assert "main.x" in first.detail
    assert first.stderr
    assert second.verdict is Verdict.COMPILE_ERROR


async def test_what_was_compiled_is_forgotten_when_there_is_too_much_of_it() -> None:
    def made(size: int) -> Outcome:
        return Outcome(
            ended="itself", exit_code=0, signal=None, checked=False, said="", stdout=b"x" * size, stderr=b"",
            stdout_total=size, stderr_total=0, wall_seconds=0, cpu_seconds=0, memory_bytes=0, oom_kills=0, processes=1,
        )  # fmt: skip

    asked: list[str] = []

    async def get(key: str, size: int) -> None:
        async def make() -> Outcome:
            asked.append(key)
            return made(size)

        assert len((await artifacts.get(key, make)).stdout) == size

    artifacts = Artifacts(room=100)
    for key, size in (("a", 40), ("b", 40), ("a", 40), ("c", 40), ("a", 40), ("b", 40), ("huge", 101), ("huge", 101)):
        await get(key, size)
    assert asked == ["a", "b", "c", "b", "huge", "huge"]


@pytest.mark.parametrize(
    ("code", "file", "start"),
    [
        ("public class Foo { }", "Foo", "Foo"),
        ("class A {}\nclass B { public static void main(String[] a) {} }", "B", "B"),
        ("import x;\nclass Only {}", "Only", "Only"),
        ("", "Main", "Main"),
        ("class Helper {}\npublic final class Real {}\n", "Real", "Real"),
        ("package a.b; public class A { static void main(String[] a) {} }", "A", "a.b.A"),
        ("import java.util.*; public class Sol { }", "Sol", "Sol"),
        ('@SuppressWarnings("class X {") public class Sol { }', "Sol", "Sol"),
        (
            "/* public class Foo {} */ // class Bar\nclass X {} class Main { static void main(String... a) {} }",
            "Main",
            "Main",
        ),
        ('class T { String s = """\npublic class Foo { """; }', "T", "T"),
        ("public class Solution {} class Main { public static void main(String[] a) {} }", "Solution", "Main"),
        (
            "class A { class B { static void main(String[] a) {} } static void main(final String[] a) {} } class C {}",
            "A",
            "A",
        ),
        (
            "record P(int x) {} enum E { A } interface I {} class Z { char c = '{'; static void main(String[] a) {} }",
            "Z",
            "Z",
        ),
        (
            "class Game { void main() { String s; } } class Main { public static void main(String[] a) {} }",
            "Main",
            "Main",
        ),
        ("class A { static void main(int x) {} } class B { static void main(String[] a) {} }", "B", "B"),
        ('class A { static void main(String[] a) {} } public @Kept({"x", "y"}) class B { }', "B", "A"),
        ("class " + "A" * 300 + " {}", "Main", "Main"),
    ],
)
def test_a_java_file_is_called_after_its_class(code: str, file: str, start: str) -> None:
    assert classes(code) == (file, start)


@pytest.mark.parametrize(
    "piece", ["/*", "\n", '"""', "public ", "final ", "class A ", "class A{void main(){}}", "\\", "{"]
)
def test_a_java_program_of_any_text_is_looked_at_once(piece: str) -> None:
    began = time.process_time()
    classes(piece * (SCANNED // len(piece)))
    assert time.process_time() - began < 20  # what looks again and again takes hours


def test_every_language_that_a_job_can_name_is_in_the_table_and_none_besides() -> None:
    assert set(NAMES["multi_code_executor"]) == LANGUAGES.keys()
    assert set(SPELLINGS.values()) <= LANGUAGES.keys()
