"""Recursion as deep as contest judges allow, in real containers: only the memory limits the stack."""

import pytest

from evalpool.schemas import JobSpec, Limits, Verdict
from evalpool.schemas.result import Result
from tests.worker.conftest import Parts, evaluated

pytestmark = pytest.mark.docker

# ruff: noqa: E501 - programs are data

LIMITS = Limits(cpu_seconds=30, wall_seconds=300, memory_mib=256)
DEEP = {
    # 200,000 frames of half a kilobyte each: 100 MiB
    "c": "#include <stdio.h>\n#include <string.h>\n"
    "long down(long n, char *above) { char room[480]; memset(room, n + *above, 480);\n"
    "  return n ? down(n - 1, room) + 1 + (room[n % 480] != room[7]) : 0; }\n"
    'int main() { printf("%ld\\n", down(200000, "x")); }',
    "cpp": "#include <bits/stdc++.h>\nstd::vector<std::vector<int>> next_(1000001);\n"
    "int depth(int v, int from) { int best = 0; for (int w : next_[v]) if (w != from) best = std::max(best, depth(w, v)); return best + 1; }\n"
    "int main() { for (int i = 1; i <= 1000000; ++i) { next_[i - 1].push_back(i); next_[i].push_back(i - 1); }\n"
    "std::cout << depth(0, -1) - 1 - 800000 << std::endl; }",
    "java": "public class Main {\n  static long down(long n) { return n == 0 ? 0 : down(n - 1) + 1; }\n"
    "  public static void main(String[] a) { System.out.println(down(400000) - 200000); }\n}",
    "python": "import sys\nsys.setrecursionlimit(10**6)\ndef down(n):\n    return down(n - 1) + 1 if n else 0\nprint(down(200000))",
    "rust": "fn down(n: u64) -> u64 { let room = [n; 40]; if n == 0 { 0 } else { down(n - 1) + unsafe { std::ptr::read_volatile(&room[3]) } - n + 1 } }\n"
    'fn main() { println!("{}", down(200000)); }',
    "ocaml": 'let rec down n = if n = 0 then 0 else 1 + down (n - 1)\nlet () = Printf.printf "%d\\n" (down 2000000 - 1800000)',
    "pascal": "function down(n: longint): longint;\nvar room: array[0..50] of longint;\nbegin room[n mod 50] := n; if n = 0 then down := 0 else down := down(n - 1) + 1 end;\nbegin writeln(down(200000)) end.",
}
"""Each prints 200000 at the end."""
CACHED = "import functools, sys\nsys.setrecursionlimit(10**6)\n@functools.lru_cache(None)\ndef down(n):\n    return down(n - 1) + 1 if n else 0\nprint(down(100000))"
"""Each call goes through C, and needs its stack."""
ENDLESS = {
    "c": "int down(volatile int *n) { volatile int m = *n + 1; return down(&m) + m; }\nint main() { volatile int n = 0; return down(&n); }",
    "java": "public class Main {\n  static int down(int n) { return down(n + 1) + n; }\n  public static void main(String[] a) { down(0); }\n}",
    "python": "def down(n):\n    return down(n + 1)\ndown(0)",
    "javascript": "function down(n) { return down(n + 1) + 1 }\ndown(0)",
}
THREADS = {
    "cpp": "#include <bits/stdc++.h>\n#include <thread>\nint main() { std::atomic<int> n{0}; std::vector<std::thread> all;\n"
    "for (int i = 0; i < 60; ++i) all.emplace_back([&] { ++n; std::this_thread::sleep_for(std::chrono::milliseconds(300)); });\n"
    "for (auto &each : all) each.join(); std::cout << n << std::endl; }",
    "python": "import threading, time\nn = []\nall = [threading.Thread(target=lambda: (n.append(1), time.sleep(0.3))) for _ in range(60)]\n"
    "for each in all: each.start()\nfor each in all: each.join()\nprint(len(n))",
}
"""Sixty threads at a time, each with a stack of its own."""


async def ran(parts: Parts, language: str, code: str, **limits: float) -> Result:
    given = LIMITS.model_copy(update=limits)
    return await evaluated(parts, JobSpec(code=code, tool="multi_code_executor", language=language, limits=given))


@pytest.mark.parametrize("language", DEEP)
async def test_recursion_may_be_deep(worker_parts: Parts, language: str) -> None:
    result = await ran(worker_parts, language, DEEP[language])
    assert (result.verdict, result.stdout.strip()) == (Verdict.PASSED, "200000"), result


async def test_recursion_of_python_through_c_may_be_deep(worker_parts: Parts) -> None:
    result = await ran(worker_parts, "python", CACHED)
    assert (result.verdict, result.stdout) == (Verdict.PASSED, "100000\n"), result


async def test_the_stack_of_java_grows_with_its_memory(worker_parts: Parts) -> None:
    code = DEEP["java"].replace("400000", "1700000")
    shallow = await ran(worker_parts, "java", code)
    assert (shallow.verdict, "StackOverflowError" in shallow.stderr) == (Verdict.RUNTIME_ERROR, True), shallow
    deep = await ran(worker_parts, "java", code, memory_mib=1024)
    assert (deep.verdict, deep.stdout) == (Verdict.PASSED, "1500000\n"), deep


async def test_the_memory_limit_bounds_the_stack(worker_parts: Parts) -> None:
    result = await ran(worker_parts, "c", DEEP["c"], memory_mib=64)
    assert result.verdict in (Verdict.RUNTIME_ERROR, Verdict.MEMORY_LIMIT)


@pytest.mark.parametrize("language", ENDLESS)
async def test_endless_recursion_ends_soon(worker_parts: Parts, language: str) -> None:
    result = await ran(worker_parts, language, ENDLESS[language])
    assert result.verdict is Verdict.RUNTIME_ERROR, result
    assert result.metrics.cpu_seconds < 10


@pytest.mark.parametrize("language", THREADS)
@pytest.mark.parametrize("memory", [64, 1024])
async def test_many_threads_have_room_for_their_stacks(worker_parts: Parts, language: str, memory: int) -> None:
    result = await ran(worker_parts, language, THREADS[language], memory_mib=memory)
    assert (result.verdict, result.stdout) == (Verdict.PASSED, "60\n"), result
