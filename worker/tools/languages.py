"""The table of languages: the file for a program, the command that compiles it and the command that runs it."""

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from evalpool.schemas.job import JobSpec
from evalpool.schemas.limits import Limits

COMPILE = Limits(cpu_seconds=30, wall_seconds=120, memory_mib=512, processes=64, output_bytes=16 << 20, disk_mib=64)
"""The limits of a compiler. A job with higher limits for memory and processes raises them for its compiler."""
PACK = (
    "{ %s; } >&2 && if [ $(du -sm . | cut -f 1) -lt 8 ]; then exec tar -cf - -- *; "
    "else exec tar -I 'gzip -1' -cf - -- *; fi"
)
"""Compiles, and then writes all files as one archive to standard output. The compiler's messages go to standard error.
A large archive is compressed, since most of it is static data."""
PACKED, UNPACK = ".program.tar", ("sh", "-c", 'tar -xf .program.tar && exec "$@"', "sh")
BINARY = "main"
MEMBERS = 256
"""How many files of an archive are searched for the program."""
OCTAL = re.compile(rb"[0-7]+")


def binary(archive: bytes) -> bytes | None:
    """Return the program from the archive that a compiler made, so that the archive need not be unpacked for every
    case. Returns `None` for an unusual archive, which is left to `tar`."""
    place = 0
    for _ in range(MEMBERS):
        head = archive[place : place + 512]
        name, size, kind, magic = head[:100].rstrip(b"\0"), head[124:135], head[156:157], head[257:262]
        if magic != b"ustar" or not OCTAL.fullmatch(size):
            return None
        length = int(size, 8)
        if (name, kind) == (BINARY.encode(), b"0"):
            found = archive[place + 512 : place + 512 + length]
            return found if len(found) == length else None
        place += 512 + (length + 511) // 512 * 512
    return None


@dataclass(frozen=True)
class Language:
    """How the programs of a language are compiled and run."""

    main: str
    """The file for the program; `{file}` and `{class}` stand for the classes that a Java program declares."""
    run: tuple[str, ...] = ()
    """The command that runs the program; empty for the warm Python interpreter. `{memory}` and `{stack}` stand for the
    sizes to which its heap and a stack may grow, in MiB."""
    compile: str = ""
    """The shell command that compiles the program; empty if it is not compiled."""
    env: dict[str, str] = field(default_factory=dict)
    out_of_memory: bytes = b""
    """What the runtime writes when it runs out of memory before the kernel ends it."""
    compiler: str = ""
    """The name of the compiler."""
    syntax: str = ""
    """The shell command that fails if the program has a syntax error, and does not run it; empty if the language is
    compiled or has no such command."""
    last_words: re.Pattern[bytes] | None = None
    """What the test runner writes at the very end if all tests have passed; a program without these words has ended
    before."""

    @property
    def needs(self) -> str:
        """The command that an image must have for this language."""
        return self.compiler or (self.run[0] if self.run else "python3")


_GO = {
    "GOCACHE": "/box/.go",
    "GOPATH": "/usr/share/gocode",
    "GOTMPDIR": "/box",
    "GO111MODULE": "off",
    "GOMAXPROCS": "1",
}
_JARS = ".:/usr/share/java/javatuples.jar"
_JAVA = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    # the archive of classes goes to the address that it was made for, and need not be moved in every start
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:ArchiveRelocationMode=0",
)
_TSC = "tsc --target es2022 --module commonjs --lib es2022,dom --esModuleInterop --skipLibCheck"
_NODE = "--typeRoots /usr/share/nodejs/@types --types node --baseUrl /usr/share/nodejs"
_RUSTC = "rustc --edition 2021 -C strip=symbols -C codegen-units=1"  # more units only help with more than one core
_ERL = "+S 1 +SDcpu 1 +SDio 1 +A 1"
_LISTENER = (
    "class FailedAssertion : System.Diagnostics.DefaultTraceListener { public override void Fail(string a, string b) {"
    ' System.Console.Error.WriteLine("Assertion failed. " + a + " " + b + System.Environment.StackTrace);'
    " System.Environment.Exit(1); } }"
)
_LISTENING = (
    '<configuration><system.diagnostics><trace><listeners><remove name="Default"/>'
    '<add name="Failed" type="FailedAssertion, main"/></listeners></trace></system.diagnostics></configuration>'
)
"""With this listener, a failed `Debug.Assert` ends the program, as in .NET. Mono by itself goes on."""

# the files between the assembler and the linker are as large as the program's static data, and /tmp is too small
_GCC = "TMPDIR=. gcc -O2 -std=%s -o main main.c -lm"
_GXX = (
    'gxx() { TMPDIR=. g++ -O2 -std=%s "$@" -o main main.cpp -Wl,--as-needed -lcrypto; }; '
    "gxx -I/usr/lib/g++ 2> .said; code=$?; "
    "if grep -q '^In file included' .said; then gxx; else cat .said >&2; (exit $code); fi"
)
"""Compiles with the precompiled headers of that folder, if the image has them. Then messages about a header do not name
the line of the program that includes it. So a program with such messages is compiled again, without the folder."""
_C = Language("main.c", ("./main",), _GCC % "gnu17", compiler="gcc")
_CPP = Language("main.cpp", ("./main",), _GXX % "gnu++17", compiler="g++")
_LISTED = "! { tests=$(timeout 5 %s) && test -z \"$tests\" && echo 'main: error: the file has no tests'; }"
"""Refuses a file without tests, which would always pass. If the list of tests fails, so does the run later."""

LANGUAGES = {
    "python": Language("main.py"),
    # a script may switch on extended patterns, which `bash -n` does not see
    "bash": Language(
        "main.sh",
        ("bash", "main.sh"),
        syntax="bash -n main.sh 2> /dev/null || bash -O extglob -n main.sh",
    ),
    "c": _C,
    "c11": replace(_C, compile=_GCC % "gnu11"),
    "cpp": _CPP,
    "cpp14": replace(_CPP, compile=_GXX % "gnu++14"),
    "cpp20": replace(_CPP, compile=_GXX % "gnu++20"),
    "cpp23": replace(_CPP, compile=_GXX % "gnu++23"),
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
        ("java", "-ea", *_JAVA, "-XX:MaxRAMPercentage=60", "-Xss{stack}m", "-cp", _JARS, "{class}"),
        f"javac {' '.join('-J' + option for option in _JAVA)} -encoding UTF-8 -d . -cp {_JARS} '{{file}}.java'",
        out_of_memory=b"java.lang.OutOfMemoryError",
        compiler="javac",
    ),
    "javascript": Language(
        "main.js",
        ("node", "--max-old-space-size={memory}", "main.js"),
        out_of_memory=b"heap out of memory",
        syntax="node --check main.js",
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
        # it makes a library of a package that is not `main`, without an error
        "go build -ldflags '-s -w' -o main main.go && rm -rf .go && "
        "{ test -x main || { echo 'main.go: error: the package must be main'; false; }; }",
        _GO,
        compiler="go",
    ),
    "go_test": Language(
        "main_test.go",
        ("./main", "-test.paniconexit0"),  # as `go test` does
        "cp -r /usr/share/gocode/cache .go; go test -c -ldflags '-s -w' -o main main_test.go && rm -rf .go && "
        + _LISTED % "./main -test.list .",
        _GO,
        compiler="go",
        last_words=re.compile(rb"PASS\n\Z"),
    ),
    "rust": Language("main.rs", ("./main",), f"{_RUSTC} -O -o main main.rs", compiler="rustc"),
    "rust_test": Language(
        "main.rs",
        ("./main",),
        f"{_RUSTC} --test -o main main.rs && " + _LISTED % "./main --list --format terse",
        compiler="rustc",
        last_words=re.compile(
            rb"\ntest result: ok\. [1-9]\d* passed; 0 failed; \d+ ignored; \d+ measured; \d+ filtered out; "
            rb"finished in [\d.]+s\n\n\Z"
        ),
    ),
    "elixir": Language(
        "main.exs",
        ("elixir", "--erl", _ERL, "main.exs"),
        syntax=f"elixir --erl '{_ERL}' -e 'Code.string_to_quoted!(File.read!(\"main.exs\"), file: \"main.exs\")'",
    ),
    "lua": Language(
        "main.lua",
        ("lua", "main.lua"),
        syntax='lua -e \'local _, why = loadfile("main.lua") if why then io.stderr:write(why, "\\n") os.exit(1) end\'',
    ),
    "ocaml": Language("main.ml", ("./main",), "ocamlopt -o main unix.cmxa str.cmxa main.ml", compiler="ocamlopt"),
    "pascal": Language("main.pas", ("./main",), "fpc -O2 -omain main.pas", compiler="fpc"),
    "perl": Language("main.pl", ("perl", "main.pl"), syntax="perl -c main.pl"),
    "php": Language("main.php", ("php", "-d", "memory_limit=-1", "main.php"), syntax="php -l main.php"),
    "r": Language(
        "main.r",
        ("Rscript", "--vanilla", "main.r"),
        syntax='Rscript --vanilla -e \'why <- tryCatch({ parse("main.r"); NULL }, error = conditionMessage); '
        'if (!is.null(why)) { message("error: ", why); quit(status = 1) }\'',
    ),
    "ruby": Language("main.rb", ("ruby", "main.rb"), syntax="ruby -c main.rb"),
    # forms are read and not expanded, since a macro may call what only a run defines
    "scheme": Language(
        "main.scm",
        ("guile", "--no-auto-compile", "main.scm"),
        syntax='guile --no-auto-compile -c \'(call-with-input-file "main.scm" '
        "(lambda (port) (let next () (or (eof-object? (read port)) (next)))))'",
    ),
    "sqlite": Language("main.sql", ("sqlite3", "-bail", ":memory:", ".read main.sql")),
    "tcl": Language("main.tcl", ("tclsh", "main.tcl")),
}

SCANNED, TOKENS = 1 << 20, 1 << 16
"""How many characters of a Java program are searched for its classes, and how many tokens. No real program has more."""
_TOKEN = re.compile(
    r"""[^"'/{};()\w.$]*+(?:"""
    r'"""[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*+(?:"""|\\?\Z)|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"?'
    r"|'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'?"
    r"|//[^\r\n]*+|/\*[^*]*+(?:\*(?!/)[^*]*+)*+(?:\*/|\Z)|/"
    r"|(\{+|\}+|;+|\(+|\)+|[\w.$]++)|\Z)",
    re.DOTALL,
)  # fmt: skip
"""Matches strings and comments and, as a group, words and separators. It matches at every position and never
backtracks, so that any program is read in one pass."""
LONGEST_NAME = 200
LARGEST_STACK = 1024
"""MiB, the most that Java accepts. It gets at most a quarter of the memory, since a stack that overflows takes three
times its size until Java reports it."""


class Classes(NamedTuple):
    """Two classes of a Java program, which may be the same."""

    file: str
    """The class that the file must be named after: the public one, if there is one."""
    start: str
    """The class that is started, with its package: one with a `main` method, and preferably the public one."""


@lru_cache(maxsize=32)
def classes(code: str) -> Classes:
    """Return the class that a Java file must be named after, and the class that is started."""
    depth, parens, before, package, latest, main = 0, 0, "", "", "", ""
    opens: list[str] = []
    mains: list[str] = []
    others: list[str] = []
    modifiers: set[str] = set()
    """The modifiers of what is being declared."""
    for word in filter(None, (found[1] for found in islice(_TOKEN.finditer(code), TOKENS))):
        mark = word[0]
        if depth > 1 and mark not in "{}":
            continue  # a method declares nothing that could be started
        if mark in "()":
            parens = max(0, parens + (len(word) if mark == "(" else -len(word))) if depth == 0 else 0
        elif parens > 0:
            continue  # these words are in an annotation or in the head of a record
        elif mark in "{};":
            depth = max(0, depth + {"{": 1, "}": -1, ";": 0}[mark] * len(word))
            modifiers.clear()
            main = ""
        elif depth == 0 and before == "package":
            package = f"{word}."
        elif depth == 0 and before in ("class", "enum", "record", "interface"):
            latest = word if len(word) < LONGEST_NAME else "Main"
            (opens if "public" in modifiers else others).append(latest)
        elif depth == 1 and (before, word) == ("void", "main") and "static" in modifiers:
            main = latest
        elif main and word != "final":  # the parameters decide: only a `main` with strings is started
            mains += [main] if word.rstrip(".") in ("String", "java.lang.String") else []
            main = ""
        elif word in ("public", "static"):
            modifiers.add(word)
        before = word
    able = set(mains)
    started = next((name for name in opens if name in able), None) or [*mains, *opens, *others, "Main"][0]
    return Classes([*opens, started][0], package + started)


def unpacked(made: bytes) -> int:
    """Return the size of an unpacked archive in bytes, as the archive itself states it: only its own program could gain
    from a lie."""
    return int.from_bytes(made[-4:], "little") if made.startswith(b"\x1f\x8b") else len(made)


def lacks(spec: JobSpec) -> str:
    """Return the end of a sentence about an image or a sandbox that lacks what the job's language needs."""
    return f"has no {LANGUAGES[spec.runs].needs}, which {spec.runs} needs"


def filled(template: str, spec: JobSpec) -> str:
    """Return a template with the values that depend on the program and its limits."""
    if "{file}" in template or "{class}" in template:
        found = classes(spec.code[:SCANNED])
        template = template.replace("{file}", found.file).replace("{class}", found.start)
    memory = spec.limits.memory_mib
    template = template.replace("{stack}", str(min(LARGEST_STACK, max(64, memory // 4))))
    return template.replace("{memory}", str(max(16, memory * 3 // 4)))
