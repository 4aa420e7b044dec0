"""A failed check names the assertion that failed and its values; and no verdict depends on this."""

import pytest

from evalpool.schemas import JobSpec, Limits, Verdict
from evalpool.worker.judge.judge import judge
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.tools.registry import TOOLS

pytestmark = pytest.mark.docker

# ruff: noqa: E501 - programs are data

F = "def f(x): return x * 2\n"
LIST = "[" + ", ".join(map(str, range(100))) + "]"

FAILURES = {
    "a comparison": (F, "assert f(1) == 2\nassert f(2) == 5\n", "assert f(2) == 5 failed: f(2) gave 4"),
    "in a function": (F, "def check(candidate):\n    # words\n    assert candidate(3) == 6\n    assert candidate(2) == 5\n\ncheck(f)", "assert candidate(2) == 5 failed: candidate(2) gave 4"),
    "of names": (F, "for given, wanted in [(1, 2), (2, 5)]:\n    assert f(given) == wanted", "assert f(given) == wanted failed: f(given) gave 4, wanted is 5"),
    "with a message": (F, "assert f(2) == 5, 'twice'", "assert f(2) == 5 failed: f(2) gave 4 (twice)"),
    "on several lines": (F, "assert (f(2)\n    ==\n    5), (\n 'twice')", "assert f(2) == 5 failed: f(2) gave 4 (twice)"),
    "of truth": (F, "assert not f(2)", "assert not f(2) failed: f(2) gave 4"),
    "of a name": (F, "same = f(2) == 5\nassert same", "assert same failed: same is False"),
    "within calls": (F, "assert abs(f(2) - 5) < 1e-6", "assert abs(f(2) - 5) < 1e-6 failed: abs(f(2) - 5) gave 1, f(2) gave 4"),
    "in a chain": (F, "low = 5\nassert low < f(2) < 9", "assert low < f(2) < 9 failed: low is 5, f(2) gave 4"),
    "of several": (F, "assert f(1) == 2 and f(2) == 5 and f(3) == 6", "assert f(1) == 2 and f(2) == 5 and f(3) == 6 failed: f(1) gave 2, f(2) gave 4"),
    "in a comprehension": (F, "wanted = [2, 5]\ndef check(g, n):\n    assert [g(i) for i in range(n)] == wanted\ncheck(f, 2)", "assert [g(i) for i in range(n)] == wanted failed: [g(i) for i in range(n)] is [0, 2], wanted is [2, 5]"),
    "by all": (F, "assert all(f(i) == 2 * i + 1 for i in range(3))", "assert all(f(i) == 2 * i + 1 for i in range(3)) failed: all(f(i) == 2 * i + 1 for i in range(3)) gave False"),
    "of other letters": ("def f(x): return 'é' + x", "wörd = 'ß'; assert f('ü') == wörd", "assert f('ü') == wörd failed: f('ü') gave 'éü', wörd is 'ß'"),
    "of much": (f"def f(): return {LIST}", f"assert f() == {LIST[:-4]}]", f"assert {('f() == ' + LIST)[:117]}... failed: f() gave {LIST[:77]}..."),
    "by numpy": ("def f(): return 1.0", "import numpy as np\nnp.testing.assert_allclose(f(), 2.0)", "np.testing.assert_allclose(f(), 2.0) raised AssertionError: Not equal to tolerance rtol=1e-07, atol=0"),
    "in the program": ("def f(x):\n    assert x, 'no x'", "assert f(0) == 5", "f(0) raised AssertionError: no x"),
    "one of two on a line": (F, "if f(2): assert f(1) == 2; assert f(2) == 5", "assert f(2) == 5 failed: f(2) gave 4"),
    "in a large check": (F, f"def check():\n    assert f(2) == 5, 'twice'\nx = {'x' * 100_000!r}\ncheck()", "assert f(2) == 5 failed: f(2) gave 4 (twice)"),
    "by itself": (F, "if f(2) != 5:\n    raise AssertionError('no five')", "AssertionError: no five"),
}  # fmt: skip

HOSTILE = {
    "a repr that raises": "class A:\n    def __repr__(self): raise SystemExit(0)\ndef f(x): return A()",
    "a repr that leaves": "import os\nclass A:\n    def __repr__(self): os._exit(0)\ndef f(x): return A()",
    "a repr that hangs": "import time\nclass A:\n    def __repr__(self):\n        while True: pass\ndef f(x): return A()",
    "a repr that is huge": "class A:\n    def __repr__(self): return 'x' * (1 << 40)\ndef f(x): return A()",
    "a repr that takes memory": "class A:\n    def __repr__(self): return repr([bytearray(1 << 20) for _ in range(1000)])\ndef f(x): return A()",
    "a repr of control characters": "class A:\n    def __repr__(self): return 'a\\n\\x1b[31m\\0checked\\u202e'\ndef f(x): return A()",
    "a call that hangs the second time": "import time\nseen = []\ndef f(x):\n    seen.append(x)\n    if seen[1:]: time.sleep(1000)\n    return 1",
    "a call that burns the second time": "seen = []\ndef f(x):\n    seen.append(x)\n    while seen[1:]: pass\n    return 1",
    "a call that is right the second time": "seen = []\ndef f(x):\n    seen.append(x)\n    return 5 if seen[1:] else 4",
    "a call that prints without end the second time": "seen = []\ndef f(x):\n    seen.append(x)\n    while seen[1:]: print('x' * 10000)\n    return 1",
    "a call that takes memory the second time": "seen, hog = [], []\ndef f(x):\n    seen.append(x)\n    while seen[1:]: hog.append(bytearray(1 << 20))\n    return 1",
    "a call that writes to every descriptor": "import os\nseen = []\ndef f(x):\n    seen.append(x)\n    for fd in range(3, 9) if seen[1:] else ():\n        try: os.write(fd, b'checked' * 9)\n        except OSError: pass\n    return 1",
    "many processes": "import os\nseen = []\ndef f(x):\n    seen.append(x)\n    while seen[1:]: os.fork()\n    return 1",
}  # fmt: skip


async def judged(box: DockerBox, code: str, check: str, **more: object) -> tuple[Verdict, str, str]:
    spec = JobSpec(code=code, check=check, **more)
    outcome = await box.run(TOOLS[spec.tool].program(spec, None))
    return *judge(outcome, spec, None), outcome.stderr.decode()


@pytest.mark.parametrize("env", [{}, {"PYTHONNOUSERSITE": "1"}], ids=["warm", "cold"])
@pytest.mark.parametrize("name", FAILURES)
async def test_a_failed_assertion_is_explained_with_its_values(box: DockerBox, name: str, env: dict[str, str]) -> None:
    code, check, words = FAILURES[name]
    verdict, detail, stderr = await judged(box, code, check, env=env, limits=Limits(cpu_seconds=20))
    assert (verdict, detail) == (Verdict.WRONG_ANSWER, words), stderr


@pytest.mark.parametrize("name", HOSTILE)
async def test_evaluating_an_assertion_again_cannot_change_the_verdict(box: DockerBox, name: str) -> None:
    limits = Limits(cpu_seconds=4, wall_seconds=60, memory_mib=128, processes=16, output_bytes=10_000)
    verdict, detail, stderr = await judged(box, HOSTILE[name], "assert f(2) == 5", limits=limits)
    assert verdict is Verdict.WRONG_ANSWER, stderr
    assert detail.startswith("assert f(2) == 5 failed")
    assert detail.isprintable()
    assert len(detail) <= 300


async def test_a_traceback_has_the_lines_of_the_check(box: DockerBox) -> None:
    code = "def f():\n    return 1 / 0\n"
    check = "def check():\n    x = 1\n    try:\n        {}['a']\n    except KeyError:\n        f()\n\n\ncheck()\n"
    verdict, detail, stderr = await judged(box, code, check)
    assert (verdict, detail) == (Verdict.RUNTIME_ERROR, "exit code 1: ZeroDivisionError: division by zero")
    places = [line.strip() for line in stderr.splitlines() if line.startswith("  File")]
    assert places == [
        'File "/box/check.py", line 4, in check',
        'File "/box/check.py", line 9, in <module>',
        'File "/box/check.py", line 6, in check',
        'File "/box/main.py", line 2, in f',
    ]


async def test_evaluating_an_assertion_again_prints_nothing(box: DockerBox) -> None:
    spec = JobSpec(code="def f():\n    print('once')\n    return 1", check="assert f() == 2")
    outcome = await box.run(TOOLS[spec.tool].program(spec, None))
    assert outcome.stdout == b"once\n"


async def test_an_assertion_is_not_evaluated_again_near_a_limit(box: DockerBox) -> None:
    code = "import time\ndef f():\n    end = time.process_time() + 0.6\n    while time.process_time() < end: pass\n    return 1"
    verdict, detail, _ = await judged(box, code, "assert f() == 2", limits=Limits(cpu_seconds=1, wall_seconds=60))
    assert (verdict, detail) == (Verdict.WRONG_ANSWER, "assert f() == 2 failed")
