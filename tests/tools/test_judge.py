from typing import Any

import pytest

from evalpool.schemas import Case, JobSpec, Limits, SandboxLost, Verdict
from evalpool.worker.judge.judge import case_result, judge
from evalpool.worker.sandbox.base import End, Note, Outcome

LIMITS = Limits(cpu_seconds=2, output_bytes=100)
PLAIN = JobSpec(code="x", limits=LIMITS)
CHECKED = JobSpec(code="x", check="assert True", limits=LIMITS)
CASES = JobSpec(code="x", cases=[Case("", "42\n")], limits=LIMITS)


def outcome(**more: Any) -> Outcome:
    usual: dict[str, Any] = {
        "ended": End.ITSELF, "exit_code": 0, "signal": None, "checked": False, "note": Note.NONE, "stdout": b"",
        "stderr": b"", "stdout_total": 0, "stderr_total": 0, "wall_seconds": 0.1, "cpu_seconds": 0.1,
        "memory_bytes": 1 << 20,
        "oom_kills": 0, "processes": 1,
    }  # fmt: skip
    return Outcome(**(usual | more))


KILLED = {"exit_code": None, "signal": 9}


@pytest.mark.parametrize(
    ("spec", "seen", "verdict"),
    [
        (PLAIN, {}, Verdict.PASSED),
        (PLAIN, {"exit_code": 3}, Verdict.RUNTIME_ERROR),
        (PLAIN, {"exit_code": None, "signal": 11}, Verdict.RUNTIME_ERROR),
        (PLAIN, KILLED, Verdict.RUNTIME_ERROR),
        (PLAIN, {"exit_code": 1, "note": Note.SYNTAX}, Verdict.COMPILE_ERROR),
        (PLAIN, {"exit_code": 1, "note": Note.RAISED}, Verdict.RUNTIME_ERROR),
        (PLAIN, {"ended": End.CPU, "cpu_seconds": 2.01, **KILLED}, Verdict.TIME_LIMIT),
        (PLAIN, {"ended": End.WALL, "cpu_seconds": 0.01, **KILLED}, Verdict.TIME_LIMIT),
        (PLAIN, {"cpu_seconds": 2.001}, Verdict.TIME_LIMIT),
        (PLAIN, {"cpu_seconds": 1.99, "wall_seconds": 9}, Verdict.PASSED),
        (PLAIN, {"oom_kills": 1, **KILLED}, Verdict.MEMORY_LIMIT),
        (PLAIN, {"oom_kills": 1, "exit_code": 1}, Verdict.MEMORY_LIMIT),
        (PLAIN, {"oom_kills": 1}, Verdict.PASSED),
        (PLAIN, {"exit_code": 1, "note": Note.MEMORY}, Verdict.MEMORY_LIMIT),
        (PLAIN, {"stdout_total": 101, "ended": End.OUTPUT, **KILLED}, Verdict.OUTPUT_LIMIT),
        (PLAIN, {"stderr_total": 101}, Verdict.OUTPUT_LIMIT),
        (PLAIN, {"stdout_total": 100}, Verdict.PASSED),
        (CHECKED, {"checked": True}, Verdict.PASSED),
        (CHECKED, {"checked": True, "exit_code": 3}, Verdict.RUNTIME_ERROR),
        (CHECKED, {}, Verdict.EARLY_EXIT),
        (CHECKED, {"exit_code": 7}, Verdict.EARLY_EXIT),
        (CHECKED, {"exit_code": 1, "note": Note.ASSERTION}, Verdict.WRONG_ANSWER),
        (CHECKED, {"exit_code": 1, "note": Note.RAISED}, Verdict.RUNTIME_ERROR),
        (CHECKED, {"exit_code": 0, "note": Note.RAISED}, Verdict.EARLY_EXIT),
        (CHECKED, {"exit_code": 0, "note": Note.MEMORY}, Verdict.EARLY_EXIT),
        (CHECKED, {"exit_code": None, "signal": 11}, Verdict.RUNTIME_ERROR),
        (CHECKED, {"exit_code": 1, "note": Note.SYNTAX}, Verdict.COMPILE_ERROR),
        (CHECKED, {"checked": True, "ended": End.CPU, "cpu_seconds": 2, **KILLED}, Verdict.TIME_LIMIT),
        (CASES, {"stdout": b"42\n", "stdout_total": 3}, Verdict.PASSED),
        (CASES, {"stdout": b"41\n", "stdout_total": 3}, Verdict.WRONG_ANSWER),
        (CASES, {"stdout": b"42\n", "stdout_total": 3, "exit_code": 1}, Verdict.RUNTIME_ERROR),
    ],
)
def test_each_outcome_has_its_verdict(spec: JobSpec, seen: dict[str, Any], verdict: Verdict) -> None:
    case = spec.cases[0] if spec.cases else None
    found, detail = judge(outcome(**seen), spec, case)
    assert found is verdict
    assert detail


def test_stored_text_is_valid_and_without_nul() -> None:
    seen = outcome(stdout=b"a\0\xff\xed\xa0\x80", stdout_total=6, stderr=b"\xc3", stderr_total=1)
    stored = case_result(0, seen, PLAIN, None)
    assert "\0" not in stored.stdout
    assert stored.stdout.startswith("a\ufffd")
    stored.stdout.encode()
    stored.stderr.encode()


def test_truncated_outputs_are_marked() -> None:
    stored = case_result(0, outcome(stdout=b"a", stdout_total=2), PLAIN, None)
    assert (stored.stdout_truncated, stored.stderr_truncated, stored.metrics.output_bytes) == (True, False, 2)


@pytest.mark.parametrize(
    ("language", "said", "told"),
    [
        ("rust", "thread 'main' panicked at 'no', main.rs:1:5\nnote: run with `RUST_BACKTRACE=1` to see more\n",
         "thread 'main' panicked at 'no', main.rs:1:5"),
        ("javascript", "/box/main.js:1\nthrow new Error('odd')\n^\n\nError: odd\n    at Object\n\nNode.js v18.20.4\n",
         "Error: odd"),
        ("java", 'Exception in thread "main" java.lang.Error: odd\n\tat A.main(A.java:1)\n',
         'Exception in thread "main" java.lang.Error: odd'),
        ("r", "Error in f() : odd\nCalls: f\nExecution halted\n", "Error in f() : odd"),
        ("go", "panic: odd\n\ngoroutine 1 [running]:\nmain.main()\n", "panic: odd"),
        ("elixir", "** (MatchError) no match\n    main.exs:1: (file)\n    (elixir) lib/code.ex:1245\n",
         "** (MatchError) no match"),
        ("bash", "first\nlast\n", "last"),
        ("python", "ValueError: first\n\nDuring handling\n\nKeyError: last\n", "KeyError: last"),
    ],
)  # fmt: skip
def test_the_detail_quotes_the_line_that_names_the_error(language: str, said: str, told: str) -> None:
    spec = JobSpec(code="", tool="multi_code_executor", language=language)
    assert judge(outcome(exit_code=1, stderr=said.encode()), spec, None)[1] == f"exit code 1: {told}"


RUST = b"\ntest result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\n"


@pytest.mark.parametrize(
    ("language", "words", "wrong"),
    [
        ("go_test", b"PASS\n", [b"", b"PASS", b"PASS\nmore\n", b"FAIL\n"]),
        (
            "rust_test",
            RUST,
            [
                b"",
                b"\ntest result: ok.\n\n",
                RUST[:-1],
                RUST + b"more\n",
                RUST.replace(b"2 passed", b"0 passed"),
                RUST[1:],
            ],
        ),
    ],
)
def test_a_test_runner_that_ends_early_has_not_passed(language: str, words: bytes, wrong: list[bytes]) -> None:
    spec = JobSpec(code="", tool="multi_code_executor", language=language)
    assert judge(outcome(stdout=b"x\n" * 1000 + words), spec, None)[0] is Verdict.PASSED
    assert judge(outcome(stdout=b"x" + words), spec, None)[0] is Verdict.PASSED
    for said in wrong:
        assert judge(outcome(stdout=b"x" + said), spec, None)[0] is Verdict.EARLY_EXIT, said


@pytest.mark.parametrize("comparator", ["exact", "rstrip", "tokens", "lcb", "float:1e-6", "json"])
@pytest.mark.parametrize("size", [10, 10_000, 1_000_000])
def test_small_and_large_outputs_are_judged_alike(comparator: str, size: int) -> None:
    """Large outputs are compared in another process."""
    expected = "[1" + ",\n1" * size + "]"
    case, limits = Case("", expected, comparator=comparator), Limits(output_bytes=16 << 20)
    spec = JobSpec(code="x", cases=[case], limits=limits)
    assert judge(outcome(stdout=expected.encode()), spec, case) == (Verdict.PASSED, "passed")
    if comparator != "exact":
        assert judge(outcome(stdout=expected.encode() + b"\n"), spec, case)[0] is Verdict.PASSED
    wrong = expected.encode().replace(b"1]", b"2]")
    verdict, detail = judge(outcome(stdout=wrong), spec, case)
    assert verdict is Verdict.WRONG_ANSWER
    assert detail.endswith(f"at line {size + 1}: expected '1]', got '2]'")


def test_a_comparison_process_that_fails_raises_sandbox_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SandboxLost, match="the comparison ended with exit code 1"):
        judge(outcome(stdout=b"x" * 20_000), CASES, CASES.cases[0])
