"""The languages, as one table: the file a program is put in, the command that compiles it, the command that runs it."""

import re
from dataclasses import dataclass, field

from schemas.job import JobSpec
from schemas.limits import Limits

COMPILE = Limits(cpu_seconds=30, wall_seconds=120, memory_mib=512, processes=64, output_bytes=16 << 20, disk_mib=64)
"""What a compiler may use, and how large its output may be; a job that has more gives it more."""
PACK = "{ %s; } >&2 && exec tar -cf - *"
"""Compile; then everything that lies there, as one archive on standard output. The messages go to standard error."""
PACKED, UNPACK = "program.tar", ("sh", "-c", 'tar -xf program.tar && exec "$@"', "sh")


@dataclass(frozen=True)
class Language:
    """How the programs of a language are run."""

    main: str
    """The file the program is put in; `{name}` stands for the class it declares."""
    run: tuple[str, ...] = ()
    """The command that runs it; empty: the warm Python interpreter. `{memory}` is its limit in MiB."""
    compile: str = ""
    """The command of a shell that compiles it, if it is compiled."""
    env: dict[str, str] = field(default_factory=dict)
    out_of_memory: bytes = b""
    """What its runtime writes when it is at its memory limit, before the kernel is."""


_GO = {
    "GOCACHE": "/box/.go",
    "GOPATH": "/usr/share/gocode",
    "GOTMPDIR": "/box",
    "GO111MODULE": "off",
    "GOMAXPROCS": "1",
}
_JARS = ".:/usr/share/java/javatuples.jar"
_JAVA = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_TSC = "tsc --target es2022 --module commonjs --lib es2022,dom --esModuleInterop --skipLibCheck"
_NODE = "--typeRoots /usr/share/nodejs/@types --types node --baseUrl /usr/share/nodejs"
_LISTENER = (
    "class FailedAssertion : System.Diagnostics.DefaultTraceListener { public override void Fail(string a, string b) {"
    ' System.Console.Error.WriteLine("Assertion failed. " + a + " " + b + System.Environment.StackTrace);'
    " System.Environment.Exit(1); } }"
)
_LISTENING = (
    '<configuration><system.diagnostics><trace><listeners><remove name="Default"/>'
    '<add name="Failed" type="FailedAssertion, main"/></listeners></trace></system.diagnostics></configuration>'
)
"""A failed `Debug.Assert` ends the program, as it does in .NET; Mono by itself goes on."""

LANGUAGES = {
    "python": Language("main.py"),
    "bash": Language("main.sh", ("bash", "main.sh")),
    "c": Language("main.c", ("./main",), "gcc -O2 -std=gnu17 -o main main.c -lm"),
    "cpp": Language("main.cpp", ("./main",), "g++ -O2 -std=gnu++17 -o main main.cpp -Wl,--as-needed -lcrypto"),
    "csharp": Language(
        "main.cs",
        ("mono", "main.exe"),
        f"echo '{_LISTENING}' > main.exe.config && echo '{_LISTENER}' > listener.cs && "
        "mcs -d:DEBUG -r:System.Numerics.dll -out:main.exe main.cs listener.cs",
        out_of_memory=b"System.OutOfMemoryException",
    ),
    "java": Language(
        "{name}.java",
        ("java", "-ea", *_JAVA, "-XX:MaxRAMPercentage=60", "-Xss64m", "-cp", _JARS, "{name}"),
        f"javac {' '.join('-J' + option for option in _JAVA)} -encoding UTF-8 -cp {_JARS} {{name}}.java",
        out_of_memory=b"java.lang.OutOfMemoryError",
    ),
    "javascript": Language(
        "main.js", ("node", "--max-old-space-size={memory}", "main.js"), out_of_memory=b"heap out of memory"
    ),
    "typescript": Language(
        "main.ts",
        ("node", "--max-old-space-size={memory}", "main.js"),
        # with the types of Node's own names; without them, if the program declares such names itself
        f'said=$({_TSC} {_NODE} main.ts) || {_TSC} main.ts > /dev/null || {{ echo "$said"; false; }}',
        out_of_memory=b"heap out of memory",
    ),
    "go": Language(
        "main.go",
        ("./main",),
        # of a package that is not `main`, it makes a library and is content
        "go build -ldflags '-s -w' -o main main.go && rm -rf .go && "
        "{ test -x main || { echo 'main.go: error: it is not of package main'; false; }; }",
        _GO,
    ),
    "go_test": Language(
        "main_test.go",
        ("./main",),
        "cp -r /usr/share/gocode/cache .go; go test -c -ldflags '-s -w' -o main main_test.go && rm -rf .go",
        _GO,
    ),
    "rust": Language("main.rs", ("./main",), "rustc --edition 2021 -O -C strip=symbols -o main main.rs"),
    "rust_test": Language("main.rs", ("./main",), "rustc --edition 2021 --test -C strip=symbols -o main main.rs"),
    "elixir": Language("main.exs", ("elixir", "--erl", "+S 1 +SDcpu 1 +SDio 1 +A 1", "main.exs")),
    "lua": Language("main.lua", ("lua", "main.lua")),
    "ocaml": Language("main.ml", ("./main",), "ocamlopt -o main unix.cmxa str.cmxa main.ml"),
    "pascal": Language("main.pas", ("./main",), "fpc -O2 -omain main.pas"),
    "perl": Language("main.pl", ("perl", "main.pl")),
    "php": Language("main.php", ("php", "-d", "memory_limit=-1", "main.php")),
    "r": Language("main.r", ("Rscript", "--vanilla", "main.r")),
    "ruby": Language("main.rb", ("ruby", "main.rb")),
    "scheme": Language("main.scm", ("guile", "--no-auto-compile", "main.scm")),
    "sqlite": Language("main.sql", ("sqlite3", "-bail", ":memory:", ".read main.sql")),
    "tcl": Language("main.tcl", ("tclsh", "main.tcl")),
}

_CLASS = re.compile(r"^\s*(?:public\s+|final\s+|abstract\s+)*(?:class|enum|record|interface)\s+(\w+)", re.MULTILINE)
_PUBLIC = re.compile(r"^\s*public\s+(?:final\s+|abstract\s+)*(?:class|enum|record|interface)\s+(\w+)", re.MULTILINE)


def class_of(code: str) -> str:
    """The class that a Java program is started by, which its file is called after: the public one, else the one whose
    body has the `main` method, else the first."""
    public = _PUBLIC.search(code)
    if public:
        return public[1]
    start = code.find("static void main")
    before = [match[1] for match in _CLASS.finditer(code) if match.start() < start]
    first = _CLASS.search(code)
    return before[-1] if before else first[1] if first else "Main"


def filled(template: str, spec: JobSpec) -> str:
    """With what the program itself decides."""
    if "{name}" in template:
        template = template.replace("{name}", class_of(spec.code))
    return template.replace("{memory}", str(max(16, spec.limits.memory_mib * 3 // 4)))
