"""Every language in real containers: programs read and write, compilers report errors, and limits hold."""

import re
from collections.abc import Callable

import docker
import pytest
from docker.errors import ImageNotFound

from evalpool.api import BatchHandle, submit_batch
from evalpool.schemas import Case, JobSpec, Limits, Settings, Verdict
from evalpool.schemas.job import LANGUAGES, SPELLINGS
from tests.conftest import PATIENCE, ROOT, WorkerProcess, missing

pytestmark = [pytest.mark.docker, pytest.mark.redis]

Start = Callable[..., WorkerProcess]

DOUBLE = {
    "python": "print(int(input()) * 2)",
    "bash": "read x; echo $((x * 2))",
    "c": (_C := '#include <stdio.h>\nint main() { int x; scanf("%d", &x); printf("%d\\n", x * 2); }'),
    "c11": _C,
    "cpp": (_CPP := "#include <bits/stdc++.h>\nint main() { int x; std::cin >> x; std::cout << x * 2 << std::endl; }"),
    # <bits/stdc++.h> is not precompiled for all of these
    **dict.fromkeys(("cpp14", "cpp20", "cpp23"), _CPP.replace("bits/stdc++.h", "iostream")),
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
UNREADABLE = {
    "python": "print(1)\nx = (1 +",
    "bash": "echo 1\nif true; then\necho 2",
    "javascript": "console.log(1); let x = ;",
    "elixir": "IO.puts 1\nx = (1 +",
    "lua": "print(1) x = = 1",
    "perl": 'print "1\\n"; my $x = ;',
    "php": "<?php echo 1; $x = ;",
    "r": "cat(1)\nfoo bar",
    "ruby": "puts 1; def x(",
    "scheme": "(display 1) (display (+ 1 2)",
}
"""Programs in languages that are not compiled, with a syntax error after a line that prints."""
LATE = {
    "bash": 'shopt -s extglob\ncase x in !(a|b)) echo 1 ;; esac\nprintf "x = (" > main.sh\nexit 3',
    "javascript": 'console.log(1); require("fs").writeFileSync("main.js", "x = ("); JSON.parse("{")',
    "elixir": 'File.write!("main.exs", "x = ("); Code.eval_string("x = (")',
    "lua": 'io.open("main.lua", "w"):write("x = = 1"):close() assert(load("x = = 1"))',
    "perl": 'open(F, ">main.pl"); print F "my = ;"; close F; eval "my = ;"; die $@',
    "php": '<?php file_put_contents("main.php", "<?php = ;"); eval("$x = ;");',
    "r": 'writeLines("foo bar", "main.r"); parse(text = "foo bar")',
    "ruby": 'File.write("main.rb", "def x("); eval("def x(")',
    "scheme": '(with-output-to-file "main.scm" (lambda () (display "(")))\n(call-with-input-string "(" read)',
    "tcl": "puts 1\nputs [expr {1 +}]",
    "sqlite": "select 1;\nselec 2;",
}
"""Programs without a syntax error that fail with the same message at run time, and spoil their own file."""
STANDARDS = {
    "c11": "#if __STDC_VERSION__ != 201112L\n#error\n#endif\nint main() {}",
    "c17": "#if __STDC_VERSION__ != 201710L\n#error\n#endif\nint main() {}",
    "cpp14": 'static_assert(__cplusplus == 201402L, ""); int main() {}',
    "c++17": "static_assert(__cplusplus == 201703L); int main() {}",
    "cpp20": "#include <compare>\nstatic_assert(__cplusplus == 202002L); int main() { return 1 <=> 1 != 0; }",
    "C++23": "#include <utility>\n#include <cstddef>\nstatic_assert(__cplusplus > 202002L);\n"
    "int main() { return std::to_integer<int>(std::byte{}) + std::to_underlying(std::byte{}); }",
}
"""Programs that compile only with the named standard."""
LIBRARY = "go", "package other\nfunc F() {}"
"""Programs that compile but cannot be run."""
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
"""Programs that end with an error."""
TESTS = {
    "go_test": 'package main\nimport ("testing"; "github.com/stretchr/testify/assert")\n'
    "func TestFine(t *testing.T) { assert.Equal(t, 1, 1) }\nfunc TestIt(t *testing.T) { assert.Equal(t, 1, %d) }",
    "rust_test": "#[test]\nfn fine() { assert_eq!(1, 1) }\n#[test]\nfn it() { assert_eq!(1, %d) }",
}
_LEAVING = 'package main\nimport ("fmt"; "os"; "testing")\nvar _ = os.Exit\nvar _ = fmt.Println\n'
_FALSE = "func TestIt(t *testing.T) { t.Fail() }\n"
FORGED = [
    ("go_test", _LEAVING + 'func TestIt(t *testing.T) { fmt.Println("PASS"); os.Exit(0) }', Verdict.RUNTIME_ERROR),
    ("go_test", _LEAVING + 'func init() { fmt.Println("PASS\\nok"); os.Exit(0) }\n' + _FALSE, Verdict.EARLY_EXIT),
    ("go_test", _LEAVING, Verdict.COMPILE_ERROR),
    (
        "rust_test",
        '#[test]\nfn it() { use std::io::Write; std::io::stdout().write_all(b"test result: ok.\\n").unwrap();\n'
        "  std::process::exit(0) }",
        Verdict.EARLY_EXIT,
    ),
    ("rust_test", "fn it() {}", Verdict.COMPILE_ERROR),
    ("rust_test", "#[test]\n#[ignore]\nfn it() {}", Verdict.EARLY_EXIT),
]
"""Tests that exit early with words like those of the runner, and files without tests."""
CHATTY = [
    ("go_test", _LEAVING + 'func TestIt(t *testing.T) { fmt.Print("no end of line") }'),
    ("rust_test", '#[test]\nfn it() { println!("PASS") }\n#[test]\n#[ignore]\nfn no() {}'),
]
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
"""Packages that the tests of benchmarks use."""
DECLARING = "typescript", "declare const process: any;\nconst timer: number = setTimeout(() => process.exit(0), 1);"
"""A program that declares names of Node itself."""
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


def test_every_language_reads_input_writes_output_and_reports_compile_errors(start_worker: Start) -> None:
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


def test_test_runners_and_assertions_pass_or_fail(start_worker: Start) -> None:
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


def test_an_early_exit_with_the_words_of_a_test_runner_does_not_pass(start_worker: Start) -> None:
    start_worker()
    forged = submit_batch([job(language, code) for language, code, _ in FORGED])
    honest = submit_batch([job(language, code) for language, code in CHATTY])
    forged.wait(timeout=4 * PATIENCE)
    honest.wait(timeout=4 * PATIENCE)
    assert [result.verdict for result in forged.results()] == [verdict for _, _, verdict in FORGED]
    assert not failures(honest)


def test_a_syntax_error_is_a_compile_error_and_an_error_at_run_time_is_not(start_worker: Start) -> None:
    start_worker()
    cases = [Case("", "1"), Case("", "1"), Case("", "1")]
    alone = submit_batch([job(language, code) for language, code in UNREADABLE.items()])
    often = submit_batch(
        [
            job(language, code, cases=cases, stop_early=False)
            for language, code in UNREADABLE.items()
            if language != "python"
        ]
    )
    late = submit_batch([job(language, code) for language, code in LATE.items()])
    shell = submit_batch([JobSpec(code="fi", tool="shell_executor"), JobSpec(code="false", tool="shell_executor")])
    begin = "BEGIN { die 'env' unless $ENV{FOO}; $line = <STDIN>; die 'input' unless defined $line }\ndie 'late';"
    given = submit_batch(
        [
            job("perl", begin, env={"FOO": "1"}, stdin="line\n"),
            job("perl", begin, env={"FOO": "1"}, cases=[Case("line\n", "1")]),
        ]
    )
    for batch in (alone, often, late, shell, given):
        batch.wait(timeout=4 * PATIENCE)
    for batch in (alone, often):
        assert {result.verdict for result in batch.results()} == {Verdict.COMPILE_ERROR}, failures(batch)
    assert all("main." in result.stderr and "main." in result.stderr + result.detail for result in often.results())
    assert not any(result.cases for result in often.results())
    assert {result.task_id: result.verdict for result in late.results()} == dict.fromkeys(LATE, Verdict.RUNTIME_ERROR)
    assert [result.verdict for result in shell.results()] == [Verdict.COMPILE_ERROR, Verdict.RUNTIME_ERROR]
    assert [result.verdict for result in given.results()] == [Verdict.RUNTIME_ERROR] * 2, failures(given)


def test_a_job_can_choose_a_standard_of_c_or_cpp(start_worker: Start) -> None:
    start_worker()
    batch = submit_batch([job(language, code) for language, code in STANDARDS.items()])
    batch.wait(timeout=4 * PATIENCE)
    assert not failures(batch)


def test_a_program_with_large_static_data_is_compiled_if_the_memory_allows(start_worker: Start) -> None:
    start_worker()
    code = (
        "#include <cstdio>\nstatic int a[%d] = {1};\n"
        'int main() { long s = 0; for (int &x : a) s += x; printf("%%ld\\n", s); }'
    )
    cases = [Case("", "1"), Case("", "1")]
    sizes = [(5, 512), (30, 512), (5, 64), (30, 64), (100, 512)]
    batch = submit_batch(
        [job("cpp", code % (mebi << 20), cases=cases, limits=Limits(memory_mib=memory)) for mebi, memory in sizes]
    )
    batch.wait(timeout=4 * PATIENCE)
    moderate, large, small, tight, huge = batch.results()
    assert [each.verdict for each in (moderate, large, small)] == [Verdict.PASSED] * 3, failures(batch)
    assert (tight.verdict, "static data" in tight.detail) == (Verdict.MEMORY_LIMIT, True), tight.detail
    assert (huge.verdict, "static data" in huge.detail) == (Verdict.COMPILE_ERROR, True), huge.detail


def test_the_document_has_every_language_and_every_alias() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*)\|", (ROOT / "docs" / "languages.md").read_text(), re.MULTILINE)
    assert tuple(name for name, _ in rows) == LANGUAGES["multi_code_executor"]
    assert {word: name for name, words in rows for word in re.findall("`([^`]+)`", words)} == SPELLINGS


def test_limits_hold_for_compiled_programs(start_worker: Start) -> None:
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
