"""Every language, in real containers: it reads and writes, its compiler's words come back, and limits hold for it."""

import re
from collections.abc import Callable

import docker
import pytest
from docker.errors import ImageNotFound

from api import BatchHandle, submit_batch
from schemas import Case, JobSpec, Limits, Settings, Verdict
from schemas.job import LANGUAGES, SPELLINGS
from tests.conftest import PATIENCE, ROOT, WorkerProcess, missing

pytestmark = [pytest.mark.docker, pytest.mark.redis]

Start = Callable[..., WorkerProcess]

DOUBLE = {
    "python": "print(int(input()) * 2)",
    "bash": "read x; echo $((x * 2))",
    "c": '#include <stdio.h>\nint main() { int x; scanf("%d", &x); printf("%d\\n", x * 2); }',
    "cpp": "#include <bits/stdc++.h>\nint main() { int x; std::cin >> x; std::cout << x * 2 << std::endl; }",
    "csharp": "using System;\nclass A { static void Main() { Console.WriteLine(int.Parse(Console.ReadLine()) * 2); } }",
    "java": "import java.util.*;\npublic class Any {\n  public static void main(String[] a) {\n"
    "    System.out.println(new Scanner(System.in).nextInt() * 2);\n  }\n}",
    "javascript": 'console.log(parseInt(require("fs").readFileSync(0, "utf8")) * 2)',
    "typescript": 'import { readFileSync } from "fs";\nconst x: number = parseInt(readFileSync(0, "utf8"));\n'
    "process.stdout.write(`${x * 2}\\n`)",
    "go": 'package main\nimport "fmt"\nfunc main() { var x int; fmt.Scan(&x); fmt.Println(x * 2) }',
    "rust": "fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap();\n"
    '  println!("{}", s.trim().parse::<i32>().unwrap() * 2); }',
    "elixir": 'IO.puts(String.to_integer(String.trim(IO.gets(""))) * 2)',
    "lua": 'print(io.read("n") * 2)',
    "ocaml": 'let () = Scanf.scanf " %d" (fun x -> Printf.printf "%d\\n" (x * 2))',
    "pascal": "var x: integer; begin read(x); writeln(x * 2); end.",
    "perl": 'print <STDIN> * 2, "\\n";',
    "php": "<?php echo intval(fgets(STDIN)) * 2;",
    "r": 'cat(as.integer(readLines(file("stdin"), n = 1)) * 2)',
    "ruby": "puts gets.to_i * 2",
    "scheme": "(display (* (read) 2))",
    "sqlite": "create table t(x integer);\n.import /dev/stdin t\nselect x * 2 from t;",
    "tcl": "puts [expr {[gets stdin] * 2}]",
}
BROKEN = {
    "c": "int main( {",
    "cpp": "int main() { return undeclared; }",
    "csharp": "class A { static void Main() { int x = 1.5; } }",
    "java": "public class A { int x = ; }",
    "typescript": 'const x: number = "text";',
    "go": "package main\nfunc main() { x }",
    "go_test": 'package main\nimport "testing"\nfunc TestIt(t *testing.T) { t.Errorf("%d", "text") }',
    "rust": "fn main() { let x: i32 = 1.5; }",
    "rust_test": "#[test]\nfn odd() { let x: i32 = 1.5; }",
    "ocaml": 'let () = print_endline (1 + "text")',
    "pascal": "begin writeln(x) end.",
}
LIBRARY = "go", "package other\nfunc F() {}"
"""What a compiler is content with, but nobody can run."""
RAISING = {
    "bash": "exit 3",
    "csharp": "using System.Diagnostics;\nclass A { static void Main() { try { Debug.Assert(1 == 2); } catch {} } }",
    "java": "class A { public static void main(String[] a) { assert 1 == 2; } }",
    "javascript": 'require("assert").equal(1, 2)',
    "typescript": 'import assert from "assert";\nassert.equal(1, 2)',
    "elixir": "1 = 2",
    "lua": "assert(1 == 2)",
    "ocaml": "let () = assert (1 = 2)",
    "perl": 'die "odd" unless 1 == 2',
    "php": "<?php throw new Exception('odd');",
    "r": "stopifnot(1 == 2)",
    "ruby": "raise 'odd' unless 1 == 2",
    "scheme": '(error "odd")',
    "sqlite": "select odd from nowhere;\nselect 1;",
    "tcl": "error odd",
}
"""Programs that end by an error of their own."""
TESTS = {
    "go_test": 'package main\nimport ("testing"; "github.com/stretchr/testify/assert")\n'
    "func TestFine(t *testing.T) { assert.Equal(t, 1, 1) }\nfunc TestIt(t *testing.T) { assert.Equal(t, 1, %d) }",
    "rust_test": "#[test]\nfn fine() { assert_eq!(1, 1) }\n#[test]\nfn it() { assert_eq!(1, %d) }",
}
LIBRARIES = {
    "cpp": "#include <boost/algorithm/string.hpp>\n#include <boost/any.hpp>\n"
    "#include <boost/multiprecision/cpp_int.hpp>\n"
    "#include <openssl/md5.h>\nint main() { return MD5_DIGEST_LENGTH - 16; }",
    "csharp": "using System.Linq; using System.Numerics;\n"
    "class A { static void Main() { System.Console.Write(new[] {1}.Sum() + new BigInteger(1)); } }",
    "java": "import org.javatuples.*;\nclass A { public static void main(String[] a) { Pair.with(1, 2); } }",
    "javascript": 'require("lodash").range(2)',
    "typescript": 'import _ from "lodash";\n_.range(2)',
    "lua": 'require("luaunit").assertEquals({1}, {1})',
    "perl": "use Test::Deep; use Data::Compare; exit !eq_deeply([1], [1])",
    "ruby": "require 'test/unit'\nclass T < Test::Unit::TestCase; def test_it; assert_equal(1, 1); end; end",
}
"""What tests of benchmarks use besides the languages themselves."""
DECLARING = "typescript", "declare const process: any;\nconst timer: number = setTimeout(() => process.exit(0), 1);"
"""A program that declares names of Node itself, in its own way."""
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


def failures(batch: BatchHandle) -> dict[str | int | None, tuple[str, str]]:
    return {result.task_id: (result.detail, result.stderr) for result in batch.results() if not result.passed}


def test_every_language_reads_writes_and_refuses(start_worker: Start) -> None:
    start_worker()
    assert set(LANGUAGES["multi_code_executor"]) == DOUBLE.keys() | TESTS.keys()
    cases = [Case("21", "42"), Case("4", "8")]
    right = submit_batch([job(language, code, cases=cases) for language, code in DOUBLE.items()])
    wrong = submit_batch([job(language, code) for language, code in [*BROKEN.items(), LIBRARY]])
    right.wait(timeout=4 * PATIENCE)
    wrong.wait(timeout=4 * PATIENCE)
    assert not failures(right)
    assert {(result.task_id, result.verdict) for result in wrong.results()} == {
        (language, Verdict.COMPILE_ERROR) for language in BROKEN
    }
    assert all("main" in result.stderr or "A.java" in result.stderr for result in wrong.results())


def test_tests_pass_or_fail_and_so_do_assertions(start_worker: Start) -> None:
    start_worker()
    tested = submit_batch([job(language, code % number) for language, code in TESTS.items() for number in (1, 2)])
    raising = submit_batch([job(language, code) for language, code in RAISING.items()])
    equipped = submit_batch([job(language, code) for language, code in [*LIBRARIES.items(), DECLARING]])
    for batch in (tested, raising, equipped):
        batch.wait(timeout=4 * PATIENCE)
    assert [result.verdict for result in tested.results()] == [Verdict.PASSED, Verdict.RUNTIME_ERROR] * len(TESTS)
    assert {result.task_id: result.verdict for result in raising.results()} == dict.fromkeys(
        RAISING, Verdict.RUNTIME_ERROR
    )
    assert not failures(equipped)


def test_the_document_has_every_language_and_every_other_word_for_it() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*)\|", (ROOT / "docs" / "languages.md").read_text(), re.MULTILINE)
    assert tuple(name for name, _ in rows) == LANGUAGES["multi_code_executor"]
    assert {word: name for name, words in rows for word in re.findall("`([^`]+)`", words)} == SPELLINGS


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
