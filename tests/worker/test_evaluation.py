"""The evaluation of one job in a fake sandbox: functions, checkers, compilers, and programs that get a second run."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from evalpool.schemas import Case, JobSpec, Limits, Settings, Verdict
from evalpool.schemas.errors import CheckerFailed, SandboxKilled, SandboxLost, SetupError
from evalpool.schemas.job import LANGUAGES as NAMES
from evalpool.schemas.job import SPELLINGS
from evalpool.schemas.lease import Lease
from evalpool.worker import pool as pools
from evalpool.worker.artifacts import Artifacts
from evalpool.worker.evaluation import evaluate
from evalpool.worker.pool import ALONE_RUNS, BATCHES, Pool
from evalpool.worker.sandbox.base import End, Note, Outcome, Program, Shape
from evalpool.worker.sandbox.fake import FakeBox
from evalpool.worker.tools import code
from evalpool.worker.tools.languages import LANGUAGES, SCANNED, Language, classes


class Watched(FakeBox):
    """Notes what runs. It can pretend that the machine was busy, or that the sandbox was paused at the wall limit."""

    programs: list[Program] = []  # noqa: RUF012 - one list for all, on purpose
    busy: list[float] = []  # noqa: RUF012
    pauses: list[float] = []  # noqa: RUF012 - of the next runs, in seconds
    losses: list[SandboxLost] = []  # noqa: RUF012 - of the next runs
    lost_at: set[int] = set()  # noqa: RUF012 - the runs, counted from 0, whose sandboxes are lost
    seen: list[int] = []  # noqa: RUF012 - how often each sandbox has been used by then
    together: list[int] = []  # noqa: RUF012 - how many ran at each start
    at_once = most = 0

    async def run(self, program: Program) -> Outcome:
        Watched.programs.append(program)
        Watched.seen.append(self.uses + 1)
        Watched.at_once += 1
        Watched.most = max(Watched.most, Watched.at_once)
        Watched.together.append(Watched.at_once)
        if Watched.losses or len(Watched.seen) - 1 in Watched.lost_at:
            Watched.at_once -= 1
            if not Watched.losses:
                raise SandboxLost("a test has taken it away")
            raise Watched.losses.pop(0)
        try:
            outcome = await super().run(program)
        finally:
            Watched.at_once -= 1
        if Watched.pauses and (paused := Watched.pauses.pop(0)):
            return replace(outcome, ended=End.WALL, exit_code=None, signal=9, paused_seconds=paused)
        starved = outcome.ended is End.WALL and Watched.busy
        return replace(outcome, delay_seconds=Watched.busy.pop(0)) if starved else outcome


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalpool.worker.turn.TURN_SECONDS", float("inf"))  # however slow this machine is
    Watched.programs, Watched.busy, Watched.pauses, Watched.most = [], [], [], 0
    Watched.seen, Watched.together, Watched.losses, Watched.lost_at = [], [], [], set()


async def run(*specs: JobSpec, slots: int = 2, spare: int = 1) -> Sequence[Any]:
    """Return the results of these jobs, which run side by side."""

    async def make(shape: Shape) -> FakeBox:
        sandbox = Watched(shape)
        await sandbox.start()
        return sandbox

    pool, artifacts = Pool(make, slots, 100, spare=spare), Artifacts()
    leases = [
        Lease(job_id=f"b-{n:06}", batch_id="b", spec=spec, attempt=1, created_at=0, started_at=0)
        for n, spec in enumerate(specs)
    ]
    try:
        return await asyncio.gather(*(evaluate(lease, pool, artifacts, Settings()) for lease in leases))
    finally:
        await pool.close()


async def test_an_attempt_ends_after_a_few_lost_sandboxes_however_they_were_lost() -> None:
    killed, lost = SandboxKilled("it ended by itself"), SandboxLost("the engine is away")
    Watched.losses = [killed, killed, *[lost] * 10]
    with pytest.raises(SandboxLost, match="away"):
        await run(JobSpec(code="print(1)"))
    assert len(Watched.losses) == 9


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


async def test_a_method_of_solution_gets_dictionaries_with_integer_keys() -> None:
    code = "class Solution:\n    def f(self, table, keep):\n        return sorted(table), list(keep)\n"
    case = Case(json.dumps([{"1": 2, "-3": 4}, {"a": 1}]), '[[-3, 1], ["a"]]', comparator="json:unwrap")
    (result,) = await run(JobSpec(code=code, entry_point="f", cases=[case]))
    assert result.passed, result.stderr


async def test_json_unwrap_accepts_the_only_element_of_the_expected_answer() -> None:
    code = "def f(): return 7"
    cases = [Case("[]", "[7]", comparator=comparator) for comparator in ("json:unwrap", "json")]
    (result,) = await run(JobSpec(code=code, entry_point="f", cases=cases, stop_early=False))
    assert [case.verdict for case in result.cases] == [Verdict.PASSED, Verdict.WRONG_ANSWER]


async def test_syntax_is_checked_once_for_all_cases_and_only_after_a_failure() -> None:
    cases = [Case("", "")] * 3

    def shell(script: str) -> JobSpec:
        return JobSpec(code=script, tool="shell_executor", cases=cases, stop_early=False)

    for script, verdict, runs in (
        ("true", Verdict.PASSED, 3),
        ("echo wrong", Verdict.WRONG_ANSWER, 3),
        ("echo if > main.sh; exit 3", Verdict.RUNTIME_ERROR, 4),
        ("echo; if", Verdict.COMPILE_ERROR, 2),
    ):
        Watched.programs = []
        (result,) = await run(shell(script))
        assert (result.verdict, len(Watched.programs)) == (verdict, runs), (script, result.detail)
    assert "syntax error" in result.detail


CHECKER = """
import sys
given, output, answer = (open(path).read() for path in sys.argv[1:])
if output == "break": raise ValueError("no")
sys.exit(0 if sorted(output.split()) == sorted(answer.split()) else 1)
"""


async def test_the_checker_of_a_job_decides_in_a_sandbox_without_the_program() -> None:
    jobs = [
        JobSpec(code=f"print({text!r}, end='')", cases=[Case("", "1 2", comparator="checker")], checker=CHECKER)
        for text in ("2 1", "2 2")
    ]
    accepted, rejected = await run(*jobs)
    assert (accepted.verdict, rejected.verdict) == (Verdict.PASSED, Verdict.WRONG_ANSWER)
    assert accepted.comparator == "checker/1"
    judged = [program for program in Watched.programs if program.files]
    assert {program.code for program in judged} == {CHECKER.encode()}


async def test_the_checker_of_a_fresh_job_runs_in_a_sandbox_that_has_never_run_anything() -> None:
    cases, code, own = [Case("", "1 2", comparator="checker")] * 3, "print('2 1', end='')", CHECKER + "# its own"
    fresh = JobSpec(code=code, cases=cases, checker=own, isolation="fresh")
    results = await run(*[JobSpec(code=code, cases=cases, checker=CHECKER)] * 2, fresh, slots=1, spare=3)
    assert all(result.passed for result in results)
    uses = [uses for program, uses in zip(Watched.programs, Watched.seen, strict=True) if program.code == own.encode()]
    assert uses == [1, 1, 1]


async def test_the_words_of_a_checker_are_one_line_that_controls_no_terminal() -> None:
    hostile = "no\n12:00:00 INFO forged\r\x1b[2J\u202e\ue000 \x9b1m" + "x" * 1000
    checker = f"import sys\nsys.stderr.write({hostile!r})\nsys.exit(int(sys.argv[1] != 'input') or CODE)"
    spec = JobSpec(code="", cases=[Case("", "", comparator="checker")], checker=checker.replace("CODE", "1"))
    (result,) = await run(spec)
    assert result.verdict is Verdict.WRONG_ANSWER
    assert "no 12:00:00 INFO forged" in result.detail
    for said in (result.detail, result.cases[0].detail):
        assert said.isprintable()
        assert len(said) < 500
    with pytest.raises(CheckerFailed) as failed:
        await run(spec.model_copy(update={"checker": checker.replace("CODE", "7")}))
    assert str(failed.value).isprintable()


async def test_a_checker_that_always_fails_is_not_a_wrong_answer() -> None:
    spec = JobSpec(code="print('break', end='')", cases=[Case("", "break", comparator="checker")], checker=CHECKER)
    with pytest.raises(CheckerFailed, match="checker_failed"):
        await run(spec)


async def test_an_output_that_only_makes_the_checker_fail_is_a_wrong_answer() -> None:
    spec = JobSpec(code="print('break', end='')", cases=[Case("", "1", comparator="checker")], checker=CHECKER)
    (result,) = await run(spec)
    assert result.verdict is Verdict.WRONG_ANSWER
    assert "not on the expected one" in result.detail


SLEEPER = "import time; time.sleep(3)"
BRIEF = Limits(cpu_seconds=1, wall_seconds=2)
"""So low that the sleeper always reaches the limit, and so high that its second run, with patience, never does."""


ECHO = [Case(f"{n}\n", f"{n}") for n in range(4)]


async def test_the_cases_of_a_job_share_a_sandbox_which_is_reset_between_them() -> None:
    code = "import os; assert not os.path.exists('mark'); open('mark', 'w').close(); print(input())"
    (result,) = await run(JobSpec(code=code, cases=ECHO), slots=1)
    assert result.passed, result.detail
    assert Watched.seen == [1, 2, 3, 4]
    assert [program.more for program in Watched.programs] == [True, True, True, False]
    first, *others = Watched.programs
    assert all(each.code is first.code and each.files is first.files for each in others)


async def test_every_case_of_a_fresh_job_has_a_sandbox_that_has_never_run_anything() -> None:
    (result,) = await run(JobSpec(code="print(input())", cases=ECHO, isolation="fresh"), slots=1)
    assert result.passed, result.detail
    assert Watched.seen == [1, 1, 1, 1]


async def test_a_case_after_one_that_ended_abnormally_runs_in_another_sandbox() -> None:
    code = "import os; n = input(); print(n, flush=True); n == '1' and os.kill(os.getpid(), 9)"
    (result,) = await run(JobSpec(code=code, cases=ECHO, stop_early=False), slots=1)
    assert [case.verdict for case in result.cases] == ["passed", "runtime_error", "passed", "passed"]
    assert Watched.seen[2:] != [3, 4]


async def test_a_case_whose_sandbox_is_lost_runs_in_a_fresh_one_and_the_others_have_run() -> None:
    Watched.lost_at = {2}
    (result,) = await run(JobSpec(code="print(input())", cases=ECHO), slots=1)
    assert result.passed, result.detail
    assert Watched.seen[:4] == [1, 2, 3, 1]
    assert len(Watched.seen) == 5


async def test_no_case_runs_after_one_that_failed() -> None:
    (result,) = await run(JobSpec(code="print(min(input(), '1'))", cases=ECHO), slots=1)
    assert [case.verdict for case in result.cases] == ["passed", "passed", "wrong_answer"]
    assert len(Watched.programs) == 3


async def test_jobs_with_many_cases_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalpool.worker.turn.TURN_SECONDS", 0.0)
    jobs = [JobSpec(code=f"print(input())  # {n}", cases=ECHO) for n in range(2)]
    assert all(result.passed for result in await run(*jobs, slots=1))
    order = [program.code[-1:] for program in Watched.programs]
    assert order[:4] != [order[0]] * 4


async def test_one_slot_is_enough_for_checkers_and_for_the_search_for_syntax_errors() -> None:
    checked = [Case("1\n", "1", comparator="checker")] * 2
    code = "print(input())"
    results = await run(
        JobSpec(code=code, cases=checked, checker="import sys; sys.exit(0)"),
        JobSpec(code="read x; echo $x; exit 3", tool="shell_executor", cases=ECHO, stop_early=False),
        slots=1,
    )
    assert [result.verdict for result in results] == ["passed", "runtime_error"]


async def test_a_program_that_was_starved_of_cpu_is_run_again_alone() -> None:
    Watched.busy = [1.0]
    starved, *others = await run(
        JobSpec(code=SLEEPER, limits=BRIEF), *[JobSpec(code="import time; time.sleep(0.1)")] * 6
    )
    assert starved.passed
    assert starved.metrics.rerun
    assert all(result.passed and not result.metrics.rerun for result in others)
    assert [program.patience for program in Watched.programs if program.patience] == [8]  # its second run


async def test_a_program_that_only_sleeps_is_not_run_again() -> None:
    (result,) = await run(JobSpec(code=SLEEPER, limits=BRIEF))
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


async def test_no_other_sandbox_is_lent_while_a_job_runs_alone() -> None:
    async def make(shape: Shape) -> FakeBox:
        sandbox = FakeBox(shape)
        await sandbox.start()
        return sandbox

    pool = Pool(make, 3, 100)
    shape, inside = Shape("x", 1, 1, 1), 0

    async def use(*, alone: bool) -> None:
        nonlocal inside
        async with pool.lend(shape, alone="batch" if alone else None):
            inside += 1
            assert not alone or inside == 1
            await asyncio.sleep(0.01)
            assert not alone or inside == 1
            inside -= 1

    await asyncio.wait_for(asyncio.gather(*(use(alone=n % 3 == 0) for n in range(12))), 30)
    await pool.close()


async def test_slots_stand_idle_for_one_batch_only_a_few_times() -> None:
    async def make(shape: Shape) -> FakeBox:
        sandbox = FakeBox(shape)
        await sandbox.start()
        return sandbox

    pool, shape = Pool(make, 2, 100), Shape("x", 1, 1, 1)

    async def room_beside(batch: str) -> bool:
        """Whether the other slot is free for somebody else while a job of this batch is to run alone."""
        async with pool.lend(shape, alone=batch):
            return not pool._slots.locked()

    seen = [await room_beside("starved") for _ in range(ALONE_RUNS + 3)]
    assert seen == [False] * ALONE_RUNS + [True] * 3
    assert not await room_beside("another")
    for n in range(2 * BATCHES):
        await room_beside(f"batch {n}")
    assert len(pool._stood) == BATCHES
    await pool.close()


async def test_a_batch_of_starved_programs_stops_its_worker_only_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "ALONE_RUNS", 2)
    Watched.busy = [1.0] * 6
    results = await run(*[JobSpec(code=SLEEPER, limits=BRIEF)] * 6, slots=6)
    assert all(result.passed and result.metrics.rerun for result in results)  # the others, too, are run again
    again = [program.patience for program in Watched.programs].index(8)
    assert max(Watched.together[again:]) > 1


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """A language whose compiler is `sh`, which refuses scripts that are not valid."""
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


async def test_the_same_source_is_compiled_once(toy: str) -> None:
    same = [compiled_job(toy, "echo 1\n", args=(str(n),)) for n in range(3)]
    results = await run(*same, compiled_job(toy, "echo 2\n"), compiled_job(toy, "echo 1\n", files={"x": "y"}))
    assert all(result.passed for result in results)
    assert compilations() == 3


async def test_the_message_of_a_compiler_is_in_the_result(toy: str) -> None:
    refused = compiled_job(toy, "if then error\n", cases=3)
    first, second = await run(refused, refused)
    assert (first.verdict, first.cases) == (Verdict.COMPILE_ERROR, ())
    assert "main.x" in first.detail
    assert first.stderr
    assert second.verdict is Verdict.COMPILE_ERROR


async def test_the_least_recently_used_artifacts_are_forgotten_first() -> None:
    def made(size: int) -> Outcome:
        return Outcome(
            ended=End.ITSELF, exit_code=0, signal=None, checked=False, note=Note.NONE, stdout=b"x" * size, stderr=b"",
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
def test_a_java_file_is_named_after_its_class(code: str, file: str, start: str) -> None:
    assert classes(code) == (file, start)


@pytest.mark.parametrize(
    "piece", ["/*", "\n", '"""', "public ", "final ", "class A ", "class A{void main(){}}", "\\", "{"]
)
def test_the_classes_of_any_java_text_are_found_in_one_pass(piece: str) -> None:
    began = time.process_time()
    classes(piece * (SCANNED // len(piece)))
    assert time.process_time() - began < 20  # what looks again and again takes hours


def test_the_table_has_exactly_the_languages_that_a_job_can_name() -> None:
    assert set(NAMES["multi_code_executor"]) == LANGUAGES.keys()
    assert set(SPELLINGS.values()) <= LANGUAGES.keys()
