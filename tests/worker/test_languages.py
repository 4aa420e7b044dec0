"""Every language, in real containers: it reads and writes, its compiler's words come back, and limits hold for it."""

from collections.abc import Callable

import docker
import pytest
from docker.errors import ImageNotFound

from api import submit_batch
from schemas import Case, JobSpec, Limits, Settings, Verdict
from schemas.job import LANGUAGES
from tests.conftest import PATIENCE, WorkerProcess, missing

pytestmark = [pytest.mark.docker, pytest.mark.redis]

Start = Callable[..., WorkerProcess]

DOUBLE = {
    "python": "print(int(input()) * 2)",
    "bash": "read x; echo $((x * 2))",
    "c": '#include <stdio.h>\nint main() { int x; scanf("%d", &x); printf("%d\\n", x * 2); }',
    "cpp": "#include <bits/stdc++.h>\nint main() { int x; std::cin >> x; std::cout << x * 2 << std::endl; }",
    "java": "import java.util.*;\npublic class Any {\n  public static void main(String[] a) {\n"
    "    System.out.println(new Scanner(System.in).nextInt() * 2);\n  }\n}",
    "javascript": 'console.log(parseInt(require("fs").readFileSync(0, "utf8")) * 2)',
    "typescript": "declare var require: any;\n"
    'const x: number = parseInt(require("fs").readFileSync(0, "utf8"));\nconsole.log(x * 2)',
    "go": 'package main\nimport "fmt"\nfunc main() { var x int; fmt.Scan(&x); fmt.Println(x * 2) }',
    "rust": "fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap();\n"
    '  println!("{}", s.trim().parse::<i32>().unwrap() * 2); }',
    "ruby": "puts gets.to_i * 2",
    "php": "<?php echo intval(fgets(STDIN)) * 2;",
    "perl": 'print <STDIN> * 2, "\\n";',
    "lua": 'print(io.read("n") * 2)',
    "r": 'cat(as.integer(readLines(file("stdin"), n = 1)) * 2)',
    "pascal": "var x: integer; begin read(x); writeln(x * 2); end.",
}
BROKEN = {
    "c": "int main( {",
    "cpp": "int main() { return undeclared; }",
    "java": "public class A { int x = ; }",
    "typescript": 'const x: number = "text";',
    "go": "package main\nfunc main() { x }",
    "rust": "fn main() { let x: i32 = 1.5; }",
    "pascal": "begin writeln(x) end.",
}
HOSTILE = {
    "fork bomb": (
        "#include <unistd.h>\nint main() { for (;;) fork(); }",
        {Verdict.TIME_LIMIT, Verdict.RUNTIME_ERROR, Verdict.MEMORY_LIMIT},
    ),
    "memory": (
        "#include <stdlib.h>\n#include <string.h>\nint main() { for (;;) memset(malloc(1 << 20), 1, 1 << 20); }",
        {Verdict.MEMORY_LIMIT},
    ),
    "loop": ("int main() { for (;;); }", {Verdict.TIME_LIMIT}),
    "crash": ("int main() { return *(volatile int *)0; }", {Verdict.RUNTIME_ERROR}),
    "output": ('#include <stdio.h>\nint main() { for (;;) puts("x"); }', {Verdict.OUTPUT_LIMIT}),
    "everybody": (
        "#include <signal.h>\nint main() { kill(-1, SIGKILL); for (;;); }",
        {Verdict.TIME_LIMIT, Verdict.RUNTIME_ERROR},
    ),
    "trace": (
        "#include <sys/ptrace.h>\nint main() { return ptrace(PTRACE_ATTACH, 1, 0, 0) == -1 ? 0 : 1; }",
        {Verdict.PASSED},  # it was refused
    ),
    "compiler's own loop": ('#include "/dev/zero"\nint main() {}', {Verdict.COMPILE_ERROR}),
}


@pytest.fixture(autouse=True)
def _image(engine_client: docker.DockerClient) -> None:
    try:
        engine_client.images.get(Settings().code_image)
    except ImageNotFound:
        missing(f"no image {Settings().code_image} here: evalpool images build code")


def job(language: str, code: str, **more: object) -> JobSpec:
    return JobSpec(code=code, tool="multi_code_executor", language=language, task_id=language, **more)


def test_every_language_reads_writes_and_refuses(start_worker: Start) -> None:
    start_worker()
    assert set(LANGUAGES["multi_code_executor"]) - {"rust_test"} == DOUBLE.keys()
    cases = [Case("21", "42"), Case("4", "8")]
    right = submit_batch([job(language, code, cases=cases) for language, code in DOUBLE.items()])
    wrong = submit_batch([job(language, code) for language, code in BROKEN.items()])
    tests = "#[test]\nfn fine() { assert_eq!(1, 1) }\n#[test]\nfn odd() { assert_eq!(1, %d) }"
    tested = submit_batch([job("rust_test", tests % number) for number in (1, 2)])
    for batch in (right, wrong, tested):
        batch.wait(timeout=4 * PATIENCE)
    assert not {result.task_id: (result.detail, result.stderr) for result in right.results() if not result.passed}
    assert {result.task_id: result.verdict for result in wrong.results()} == dict.fromkeys(
        BROKEN, Verdict.COMPILE_ERROR
    )
    assert all("main" in result.stderr or "A.java" in result.stderr for result in wrong.results())
    assert [result.verdict for result in tested.results()] == [Verdict.PASSED, Verdict.RUNTIME_ERROR]


def test_limits_hold_for_what_was_compiled(start_worker: Start) -> None:
    worker = start_worker()
    limits = Limits(cpu_seconds=1, wall_seconds=10, memory_mib=64)
    batch = submit_batch([job("c", code, limits=limits) for code, _ in HOSTILE.values()])
    batch.wait(timeout=4 * PATIENCE)
    found = dict(zip(HOSTILE, batch.results(), strict=True))
    wrong = {
        name: (result.verdict, result.detail)
        for name, result in found.items()
        if result.verdict not in HOSTILE[name][1]
    }
    assert not wrong
    assert worker.stop() == 0
