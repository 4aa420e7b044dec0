"""The languages, as one table: the file a program is put in, the command that compiles it, the command that runs it."""

import re
from dataclasses import dataclass, field
from functools import lru_cache

from schemas.job import JobSpec
from schemas.limits import Limits

COMPILE = Limits(cpu_seconds=30, wall_seconds=120, memory_mib=512, processes=64, output_bytes=16 << 20, disk_mib=64)
"""What a compiler may use, and how large its output may be; a job that has more gives it more."""
PACK = "{ %s; } >&2 && exec tar -cf - -- *"
"""Compile; then everything that lies there, as one archive on standard output. The messages go to standard error."""
PACKED, UNPACK = ".program.tar", ("sh", "-c", 'tar -xf .program.tar && exec "$@"', "sh")


@dataclass(frozen=True)
class Language:
    """How the programs of a language are run."""

    main: str
    """The file the program is put in; `{file}` and `{class}` stand for the classes that a Java program declares."""
    run: tuple[str, ...] = ()
    """The command that runs it; empty: the warm Python interpreter. `{memory}` is its limit in MiB."""
    compile: str = ""
    """The command of a shell that compiles it, if it is compiled."""
    env: dict[str, str] = field(default_factory=dict)
    out_of_memory: bytes = b""
    """What its runtime writes when it is at its memory limit, before the kernel is."""
    compiler: str = ""
    """The program that compiles it."""
    last_words: bytes = b""
    """What its test runner writes when all tests have passed: a program that ends before has not come so far."""

    @property
    def needs(self) -> str:
        """The program that an image must have."""
        return self.compiler or (self.run[0] if self.run else "python3")


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
_RUSTC = "rustc --edition 2021 -C strip=symbols"
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
    "c": Language("main.c", ("./main",), "gcc -O2 -std=gnu17 -o main main.c -lm", compiler="gcc"),
    "cpp": Language(
        "main.cpp", ("./main",), "g++ -O2 -std=gnu++17 -o main main.cpp -Wl,--as-needed -lcrypto", compiler="g++"
    ),
    "csharp": Language(
        "main.cs",
        ("mono", "main.exe"),
        f"echo '{_LISTENING}' > main.exe.config && echo '{_LISTENER}' > listener.cs && "
        "mcs -d:DEBUG -r:System.Numerics.dll -out:main.exe main.cs listener.cs",
        out_of_memory=b"System.OutOfMemoryException",
        compiler="mcs",
    ),
    "java": Language(
        "{file}.java",
        ("java", "-ea", *_JAVA, "-XX:MaxRAMPercentage=60", "-Xss64m", "-cp", _JARS, "{class}"),
        f"javac {' '.join('-J' + option for option in _JAVA)} -encoding UTF-8 -d . -cp {_JARS} '{{file}}.java'",
        out_of_memory=b"java.lang.OutOfMemoryError",
        compiler="javac",
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
        compiler="tsc",
    ),
    "go": Language(
        "main.go",
        ("./main",),
        # of a package that is not `main`, it makes a library and is content
        "go build -ldflags '-s -w' -o main main.go && rm -rf .go && "
        "{ test -x main || { echo 'main.go: error: it is not of package main'; false; }; }",
        _GO,
        compiler="go",
    ),
    "go_test": Language(
        "main_test.go",
        ("./main",),
        "cp -r /usr/share/gocode/cache .go; go test -c -ldflags '-s -w' -o main main_test.go && rm -rf .go",
        _GO,
        compiler="go",
        last_words=b"PASS\n",
    ),
    "rust": Language("main.rs", ("./main",), f"{_RUSTC} -O -o main main.rs", compiler="rustc"),
    "rust_test": Language(
        "main.rs", ("./main",), f"{_RUSTC} --test -o main main.rs", compiler="rustc", last_words=b"test result: ok."
    ),
    "elixir": Language("main.exs", ("elixir", "--erl", "+S 1 +SDcpu 1 +SDio 1 +A 1", "main.exs")),
    "lua": Language("main.lua", ("lua", "main.lua")),
    "ocaml": Language("main.ml", ("./main",), "ocamlopt -o main unix.cmxa str.cmxa main.ml", compiler="ocamlopt"),
    "pascal": Language("main.pas", ("./main",), "fpc -O2 -omain main.pas", compiler="fpc"),
    "perl": Language("main.pl", ("perl", "main.pl")),
    "php": Language("main.php", ("php", "-d", "memory_limit=-1", "main.php")),
    "r": Language("main.r", ("Rscript", "--vanilla", "main.r")),
    "ruby": Language("main.rb", ("ruby", "main.rb")),
    "scheme": Language("main.scm", ("guile", "--no-auto-compile", "main.scm")),
    "sqlite": Language("main.sql", ("sqlite3", "-bail", ":memory:", ".read main.sql")),
    "tcl": Language("main.tcl", ("tclsh", "main.tcl")),
}

SCANNED = 1 << 20
"""Characters of a program in which its classes are looked for."""
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)|"(?:\\.|[^"\\\n])*"?' r"|'(?:\\.|[^'\\\n])*'?"
    r"|//[^\r\n]*|/\*.*?(?:\*/|\Z)|([{};()]|[\w.$]+)",
    re.DOTALL,
)  # fmt: skip
"""Texts and comments; and, as a group, words and what divides them. Whatever a program says, one look is enough."""
LONGEST_NAME = 200


@lru_cache(maxsize=32)
def classes(code: str) -> tuple[str, str]:
    """The class that a Java file must be called after: the public one, if there is one. And the one that is started,
    with its package: the one with a `main` method, the public one first."""
    depth, parens, before, package, latest, main = 0, 0, "", "", "", ""
    opens: list[str] = []
    mains: list[str] = []
    others: list[str] = []
    said: set[str] = set()
    """Modifiers of what is being declared."""
    for word in filter(None, (found[1] for found in _TOKEN.finditer(code))):
        if word in "()":
            parens = max(0, parens + {"(": 1, ")": -1}[word]) if depth == 0 else 0
        elif parens > 0:
            continue  # of an annotation, or the head of a record
        elif word in "{};":
            depth = max(0, depth + {"{": 1, "}": -1, ";": 0}[word])
            said.clear()
            main = ""
        elif depth == 0 and before == "package":
            package = f"{word}."
        elif depth == 0 and before in ("class", "enum", "record", "interface"):
            latest = word if len(word) < LONGEST_NAME else "Main"
            (opens if "public" in said else others).append(latest)
        elif depth == 1 and (before, word) == ("void", "main") and "static" in said:
            main = latest
        elif main and word != "final":  # whose parameters decide: only one with texts is started
            mains += [main] if word.rstrip(".") in ("String", "java.lang.String") else []
            main = ""
        elif word in ("public", "static"):
            said.add(word)
        before = word
    able = set(mains)
    started = next((name for name in opens if name in able), None) or [*mains, *opens, *others, "Main"][0]
    return [*opens, started][0], package + started


def filled(template: str, spec: JobSpec) -> str:
    """With what the program itself decides."""
    if "{file}" in template or "{class}" in template:
        file, start = classes(spec.code[:SCANNED])
        template = template.replace("{file}", file).replace("{class}", start)
    return template.replace("{memory}", str(max(16, spec.limits.memory_mib * 3 // 4)))
