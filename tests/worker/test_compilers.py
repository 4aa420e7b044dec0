"""The compilers of the code image start from files that no program can change, and say the same as without them."""

import json
from collections.abc import Iterator

import docker
import pytest
from docker.errors import ImageNotFound
from docker.models.containers import Container

from evalpool.schemas import JobSpec, Settings
from evalpool.worker.tools.code import steps
from tests.conftest import missing

pytestmark = pytest.mark.docker

RUN = """
import json, os, shutil, subprocess, sys

main, code, env, commands = json.loads(sys.argv[1])
said = []
for command in commands:
    shutil.rmtree("/tmp/box", ignore_errors=True)
    os.mkdir("/tmp/box")
    with open("/tmp/box/" + main, "w") as file:
        file.write(code)
    env = os.environ | env | {"HOME": "/tmp/box"}
    run = subprocess.run(["sh", "-c", command], cwd="/tmp/box", env=env, capture_output=True, text=True)
    said.append([run.returncode, run.stdout, run.stderr])
print(json.dumps(said))
"""
"""Runs commands in the image, each in a folder with nothing but the program."""

TYPESCRIPT = {
    "right": 'import * as fs from "fs";\nconst n: number = Number(fs.readFileSync(0, "utf8"));\nconsole.log(n ** 2);',
    "wrong type": 'const x: number = "text";\nconst y: Map<string, number[]> = new Map([["a", 1]]);\ny.missing(x);',
    "syntax": "function f( { return 1 }\nlet x = ;",
    "names of Node": "declare const process: any;\nconst timer: number = setTimeout(() => process.exit(0), 1);",
    "own declarations": 'interface String { twice(): string }\nclass Element {}\n"a".twice().thrice();',
    "no such module": 'import x from "nowhere";\nimport _ from "lodash";\nexport const y = _.range(x).foo;',
    "union": "type A = { kind: 'a'; x: number } | { kind: 'b'; y: string };\nconst f = (a: A): number => a.y;\n"
    "const p: Promise<string[]> = Promise.all([1, 'x']);\ndocument.body.foo(window.setTimeout);",
}
CSHARP = {
    "right": "using System.Linq;\nclass A { static void Main() { System.Console.Write(new[] {1, 2}.Sum(x => x)); } }",
    "wrong type": "using System;\nusing System.Collections.Generic;\nclass A { static void Main() { int x = 1.5;\n"
    'List<string> y = new List<int>(); Console.WriteLine(x.Foo, z); string s = $"{y}" } }',
    "warning": "class A { static int unused; static void Main() { int x = 1; if (false) { return; } } }",
    "missing": "using Nowhere;\nclass A { B b; void F() { foreach (var x in 5) yield return x; } }",
}
JAVA = {
    "right": "import java.util.*;\nclass A { public static void main(String[] a) { System.out.println(List.of(a)); } }",
    "wrong type": "import java.util.*;\nclass A { int x = 1.5; List<String> y = List.of(1); void f() { g(x -> x); } }",
    "syntax": "public class A { int x = ; void f( { }",
    "note": "import java.util.*;\nclass A { List x = new ArrayList(); void f() { x.add(1); new Thread().stop(); } }",
}
_BODY = (
    "using namespace std;\nstruct S {};\nint main() { S s; cout << s; string t = 5; sort(1, 2); undeclared();\n"
    "  map<S, int> m; m[s] = 1; unique_ptr<int> p, q = p; return 08; }\n"
)
CPP = {
    "right": "#include <bits/stdc++.h>\nint main() { std::map<int, std::string> m; std::cout << m.size(); }",
    "everything": "#include <bits/stdc++.h>\n" + _BODY,
    "little": "#include <iostream>\n" + _BODY,
    "names": "#include <bits/stdc++.h>\nusing namespace std;\nint data, y1; int main() { return data + y1; }",
    "warning": "#include <iostream>\n#warning odd\nint f() {}\nint main() { char c = 300; std::cout << c; }",
    "linker": "#include <iostream>\nint nowhere(); int main() { std::cout << nowhere(); }",
}


@pytest.fixture(scope="module")
def image(engine_client: docker.DockerClient) -> Iterator[Container]:
    try:
        engine_client.images.get(Settings().code_image)
    except ImageNotFound:
        missing(f"no image {Settings().code_image} here: evalpool images build code")
    container = engine_client.containers.run(
        Settings().code_image,
        ["sleep", "3600"],
        detach=True,
        init=True,
        network_mode="none",
        user="65534:65534",
        read_only=True,
        tmpfs={"/tmp": "exec,size=256m,mode=1777"},
    )
    yield container
    container.remove(force=True, v=True)


def said(image: Container, language: str, code: str, *commands: str) -> list[tuple[int, str, str]]:
    """Return the exit code and the output of each command in a folder with the program. In a command, `{}` stands for
    the one that jobs in this language are compiled with."""
    todo = steps(JobSpec(code=code, tool="multi_code_executor", language=language))
    lines = [command.replace("{}", todo.compile) for command in commands]
    done = image.exec_run(["python3", "-c", RUN, json.dumps([todo.main, code, todo.env, lines])])
    assert done.exit_code == 0, done.output
    return [(status, out, errors) for status, out, errors in json.loads(done.output)]


@pytest.mark.parametrize("name", TYPESCRIPT)
def test_the_snapshot_of_the_typescript_compiler_says_the_same(image: Container, name: str) -> None:
    plain = 'tsc() { node /usr/share/nodejs/typescript/bin/tsc "$@"; }; {}'
    warm, cold = said(image, "typescript", TYPESCRIPT[name], "{}", plain)
    assert warm == cold


@pytest.mark.parametrize("name", CSHARP)
def test_the_compiled_csharp_compiler_says_the_same(image: Container, name: str) -> None:
    plain = 'mcs() { mono /usr/lib/mono/4.5/mcs.exe "$@"; }; {}'
    warm, cold = said(image, "csharp", CSHARP[name], "{}", plain)
    assert warm == cold


@pytest.mark.parametrize("name", JAVA)
def test_the_archive_of_the_java_compiler_says_the_same(image: Container, name: str) -> None:
    warm, cold = said(image, "java", JAVA[name], "{}", 'javac() { command javac -J-Xshare:off "$@"; }; {}')
    assert warm == cold


@pytest.mark.parametrize("language", ["cpp17", "cpp20"])
def test_the_precompiled_headers_of_cpp_say_the_same(image: Container, language: str) -> None:
    neat = "{ %s; } 2> .all; code=$?; sed -E 's/cc[A-Za-z0-9]+[.]o/cc.o/' .all; exit $code"  # that name is random
    plain = f"TMPDIR=. g++ -O2 -std=gnu++{language[3:]} -o main main.cpp -Wl,--as-needed -lcrypto"
    for name, code in CPP.items():
        warm, cold = said(image, language, code, neat % "{}", neat % plain)
        assert warm == cold, name


def test_the_compilers_use_what_was_made_for_them(image: Container) -> None:
    [started] = said(image, "typescript", "", "node --snapshot-blob /usr/share/nodejs/typescript/lib/tsc.blob tsc -v")
    assert started[0] == 64, started

    [logged] = said(image, "csharp", CSHARP["right"], "export MONO_LOG_LEVEL=debug MONO_LOG_MASK=aot; {}")
    for file in ("mcs.exe", "mscorlib.dll", "System.Core.dll"):
        assert f"'/usr/lib/mono/aot/{file}.so' found" in f"{logged[1]}{logged[2]}", file

    log = 'javac() { command javac -J-Xshare:on -J-Xlog:class+load -J-Xlog:cds "$@"; }; {}'
    [loaded] = said(image, "java", JAVA["right"], log)
    assert "com.sun.tools.javac.comp.Attr source: shared objects file" in loaded[1]
    assert "Lambda$" in "".join(line for line in loaded[1].splitlines() if "javac" in line and "shared" in line)

    for header in ("bits/stdc++.h", "iostream"):
        for standard in ("17", "20", "23"):
            code = f"#include <{header}>\nint main() {{}}"
            show = f"g++ -H -I/usr/lib/g++ -O2 -std=gnu++{standard} -fsyntax-only main.cpp"
            [shown] = said(image, "cpp", code, show)
            used = [line for line in shown[2].splitlines() if line.startswith("! ")]
            assert [header in line for line in used] == [True], shown


def test_a_typescript_program_is_compiled_without_the_snapshot_if_node_refuses_it(image: Container) -> None:
    # with other options for V8, as on another processor, the snapshot does not fit
    refused = "export NODE_OPTIONS=--max-semi-space-size=8; {}"
    check = "node --max-semi-space-size=8 --snapshot-blob /usr/share/nodejs/typescript/lib/tsc.blob tsc -v"
    warm, cold, tried = said(image, "typescript", TYPESCRIPT["wrong type"], "{}", refused, check)
    assert tried[0] != 64
    assert "Failed to load the startup snapshot" in tried[2]
    assert warm == cold


def test_no_program_can_write_what_compilers_start_from(image: Container) -> None:
    places = (
        "/usr/share/nodejs/typescript/lib /usr/lib/mono/aot /usr/lib/g++ /usr/lib/jvm/*/lib/server /usr/include/*/c++ "
        "/usr/bin/tsc /usr/bin/mcs"
    )
    found = image.exec_run(["sh", "-c", f"find -L {places} '(' ! -user root -o -perm /022 ')' ! -type l"])
    assert (found.exit_code, found.output) == (0, b"")  # all of them are there, and none can be written
