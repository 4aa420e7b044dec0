"""The kernel of a notebook, which runs cells one after another in one namespace, as Jupyter does.

It is started inside a sandbox as `python3 -c SOURCE`, so it imports nothing of ours and runs on any Python since 3.9.
Requests are lines of JSON on standard input with `id`, `code`, `barrier` and `display`; if the latter is false, only
what the cell prints is shown. Replies are lines of JSON on descriptor 3: first `ready`, then for each request any
number of `display` and one `done`, whatever the cell does, as long as this process lives. Before `done`, the barrier is
written to descriptors 1 and 2, where cells print: when it has arrived, all output of the cell has. With a FILE as
argument, the kernel runs the cells of that file up to the first error.
"""

from __future__ import annotations
import __future__

import ast
import base64
import builtins
import fcntl
import io
import json
import linecache
import os
import re
import signal
import sys
import threading
import traceback
import types
from contextlib import suppress
from importlib.machinery import PathFinder
from time import monotonic
from typing import Any

MESSAGE = 16 << 20  # the most bytes of one message
HIGH = 200  # our own descriptors are above this, out of the way of cells
PYPLOT = "matplotlib.pyplot"
AWAIT, IS_COROUTINE = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, 0x80
TEXT = 1 << 20  # the most bytes of one text
SVG = "image/svg+xml"
FORMS = ("text/html", "text/markdown", "text/latex", "image/png", "image/jpeg", "application/json", SVG)
REPRS = {mime: "_repr_{}_".format(re.split("[/+]", mime)[1]) for mime in FORMS}
OURS = globals()


def called(function: Any, *args: Any, **named: Any) -> Any:
    """Call a function that may run code of a cell. Only code below this call can be interrupted."""
    return function(*args, **named)


def cut(text: str) -> str:
    """Return the beginning of a text, as valid UTF-8."""
    text = str.__str__(text)  # a subclass of a cell may do anything
    data = text[:TEXT].encode("utf-8", "backslashreplace")
    note = f"\n[cut: it has {len(text)} characters]" if max(len(text), len(data)) > TEXT else ""
    return data[:TEXT].decode("utf-8", "ignore") + note


def packed(mime: str, data: Any) -> str:
    """Return text as it is, and images in base64."""
    if isinstance(data, str) and mime == SVG:
        data = str.encode(data, "utf-8", "replace")
    if isinstance(data, bytes):
        return base64.b64encode(data).decode()
    text = data if isinstance(data, str) else json.dumps(data)
    return cut(text) if mime.startswith("text/") else str.encode(text, "utf-8", "replace").decode()


def bundle(thing: Any) -> dict[str, str]:
    """Return every form in which a thing can be shown, by MIME type. Only its class is asked, since some objects claim
    to have any attribute."""
    kind: Any = type(thing)
    found = {mime: called(getattr(kind, name), thing) for mime, name in REPRS.items() if hasattr(kind, name)}
    if issubclass(kind, getattr(sys.modules.get("matplotlib.figure"), "Figure", ())):
        called(kind.savefig, thing, image := io.BytesIO(), format="png", bbox_inches="tight")
        found["image/png"] = image.getvalue()
    found["text/plain"] = called(repr, thing)
    if hasattr(kind, "_repr_mimebundle_"):
        given = called(kind._repr_mimebundle_, thing, include=None, exclude=None)
        found.update((given[0] if isinstance(given, tuple) else given) or {})
    bare = {mime: data[0] if isinstance(data, tuple) else data for mime, data in found.items()}  # without metadata
    forms = [(mime, data) for mime, data in bare.items() if data is not None][:100]  # no honest object has more
    return {cut(mime): called(packed, mime, data) for mime, data in forms}


def trim(error: BaseException) -> None:
    """Remove our own frames, and those between ours and the cell's, from the tracebacks of an error and its causes."""
    todo: list[Any] = [error]
    seen = {id(None)}
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        entries, entry = [], each.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        cells = [at for at, entry in enumerate(entries) if entry.tb_frame.f_code.co_filename.startswith("<cell ")]
        start = cells[0] if cells and entries[0].tb_frame.f_globals is OURS else 0
        following = None
        for entry in reversed(entries[start:]):
            if entry.tb_frame.f_globals is not OURS:
                entry.tb_next, following = following, entry
        each.__traceback__ = following
        group = isinstance(each, getattr(builtins, "BaseExceptionGroup", ()))
        todo += [each.__cause__, each.__context__, *(each.exceptions if group else ())]


def described(error: BaseException) -> dict[str, str]:
    """Return the name, value and traceback of an error. Each may fail, since the class may be the cell's own."""
    name = value = type.__dict__["__name__"].__get__(type(error))
    text = f"{name}\n"
    with suppress(BaseException):
        value = f"<unprintable {name}>"
        value = called(str, error)
    with suppress(BaseException):
        trim(error)
        form = called(traceback.TracebackException, type(error), error, error.__traceback__)
        text = "".join(form.format() if error.__traceback__ else form.format_exception_only())
    return {"name": cut(name)[:1000], "value": cut(value), "traceback": cut(text)}


def write(fd: int, data: bytes) -> None:
    """Write all data, even if a child process has made the pipe non-blocking."""
    os.set_blocking(fd, True)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def flush() -> None:
    """Flush what has been printed."""
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        with suppress(BaseException):
            called(getattr(sys, name).flush)


class Shown:
    """Text or bytes with a MIME type, like the classes of `IPython.display`."""

    mime = "text/plain"

    def __init__(self, data: Any = None, filename: str | None = None, **_: Any) -> None:
        if filename is not None or (self.mime.startswith("image/") and isinstance(data, str) and "<svg" not in data):
            with io.FileIO(filename or data) as file:
                data = file.read()
        self.data = data.decode() if isinstance(data, bytes) and self.mime == SVG else data

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {self.mime: self.data}


def stand_in(display: Any) -> None:
    """Provide what notebooks import of IPython to show things, if IPython is not installed."""
    shown = types.ModuleType("IPython.display")
    mimes = {
        "HTML": "text/html", "Markdown": "text/markdown", "Latex": "text/latex", "Math": "text/latex", "SVG": SVG,
        "Image": "image/png", "JSON": "application/json", "Code": "text/plain", "Javascript": "application/javascript",
    }  # fmt: skip
    for name, mime in mimes.items():
        setattr(shown, name, type(name, (Shown,), {"mime": mime}))
    vars(shown).update(display=display, clear_output=lambda *_, **__: None)
    package = types.ModuleType("IPython")
    vars(package).update(display=shown, get_ipython=lambda: None, __path__=[])
    sys.modules.setdefault("IPython", package)
    sys.modules.setdefault("IPython.display", shown)


QUIET = ("matplotlib", "config", "load_ext", "autoreload")  # magics that are ignored


def plain(source: str) -> str:
    """Return a cell as plain Python. Lines with `!` go to the shell, and most lines with `%` raise `SyntaxError`."""

    bash = "/bin/bash" if os.access("/bin/bash", os.X_OK) else None

    def shell(line: str, check: bool = False) -> str:
        return f"__import__('subprocess').run({line!r}, shell=True, executable={bash!r}, check={check}) and None"

    head, _, rest = source.lstrip().partition("\n")
    if head.strip() in ("%%bash", "%%sh"):
        return shell(rest, check=True)
    lines = []
    for line in source.split("\n"):
        words = line.lstrip()
        space, mark, words = line[: len(line) - len(words)], words[:1], words[1:]
        name = words.partition(" ")[0]
        if mark == "!":
            line = space + shell(words)
        elif mark == "%" and name in QUIET:
            line = space + "pass"
        elif mark == "%":
            raise SyntaxError(f"the magic {mark}{name} is not supported here")
        elif found := re.fullmatch(r"(\s*)(\w+)\s*=\s*!(.*)", line):
            more = f"shell=True, executable={bash!r}, capture_output=True, text=True"
            run = f"__import__('subprocess').run({found[3]!r}, {more})"
            line = f"{found[1]}{found[2]} = {run}.stdout.splitlines()"
        lines.append(line)
    return "\n".join(lines)


async def chained(codes: list[types.CodeType], space: dict[str, Any]) -> Any:
    """Run the parts of a cell with `await` in the running event loop. The code of the cell can be interrupted here,
    too."""
    for code in codes:
        value = eval(code, space)
        value = await value if code.co_flags & IS_COROUTINE else value
    return value


class Kernel:
    """The state that cells share, and what is repaired between them."""

    def __init__(self) -> None:
        self.showing = self.put_off = False
        self.owner = os.getpid(), threading.get_ident()
        self.streams = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in range(3)]
        self.origin, self.main = sys.modules["__main__"], types.ModuleType("__main__")
        self.futures = 0
        self.loop: Any = None
        builtins.display = self.display  # type: ignore[attr-defined]
        stand_in(self.display)
        os.environ.setdefault("MPLBACKEND", "Agg")
        sys.meta_path.insert(0, self)
        sys.path.insert(0, "")  # for cells, as usual; only now, so that no file there replaces our own imports
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        signal.signal(signal.SIGINT, self.interrupt)

    def show(self, shown: dict[str, str], head: str = "") -> None:
        """Write a display as text, between what the cell prints."""
        images = [(mime, data) for mime, data in shown.items() if mime.startswith("image/")]
        lines = [f"[{mime}, {len(data) * 3 // 4 - data[-2:].count('=')} bytes]" for mime, data in images]
        if head or not images:
            lines.insert(0, head + shown["text/plain"])
        flush()
        write(self.streams[1], "".join(f"{line}\n" for line in lines).encode())

    def interrupt(self, _: int, frame: types.FrameType | None) -> None:
        """Handle SIGINT: end code of the cell at once, but wait while our own code runs, which must not be
        interrupted."""
        while frame is not None and frame.f_globals is not OURS:
            frame = frame.f_back
        if frame is not None and frame.f_code in (called.__code__, chained.__code__):
            raise KeyboardInterrupt
        self.put_off = True

    def run(self, name: str, source: str, showing: bool = True) -> tuple[dict[str, str] | None, BaseException | None]:
        """Run a cell. Returns the value of its last expression in all forms, and the error that ended the cell."""
        result: dict[str, str] | None = None
        error: BaseException | None = None
        try:
            self.prepare()
            self.showing = showing
            value = self.evaluate(name, source)
            if value is not None and showing:
                vars(self.main)["_"] = value
                result = bundle(value)
        except BaseException as raised:
            error = raised
        if os.getpid() != self.owner[0]:  # a child that the cell has forked and that has reached the end of the cell
            flush()
            write(2, described(error)["traceback"].encode() if error else b"")
            os._exit(error is not None)
        try:
            self.calm()
            self.figures()
        except BaseException as raised:
            error = error or raised
        flush()
        return result, error

    def prepare(self) -> None:
        """Reopen the standard streams before a cell if they were closed. A stream that a cell has replaced stays."""
        for fd, name in enumerate(("stdin", "stdout", "stderr")):
            with suppress(Exception):
                try:
                    os.set_blocking(fd, True)
                except OSError:
                    os.dup2(self.streams[fd], fd)
                if getattr(sys, name, None) is None or getattr(sys, name).closed:
                    setattr(sys, name, os.fdopen(fd, "w" if fd else "r", 1, "utf-8", closefd=False))
        sys.modules["__main__"] = self.main

    def calm(self) -> None:
        """Remove handlers and timers that a cell has left behind, since they would interrupt our own code."""
        signal.signal(signal.SIGINT, self.interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.settrace(None)
        sys.setprofile(None)
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000))

    def evaluate(self, name: str, source: str) -> Any:
        """Run a cell and return the value of its last expression, unless a semicolon follows it."""
        lines = io.StringIO(source + "\n", newline=None).readlines()
        linecache.cache[name] = len(source), None, lines, name
        parsing: dict[str, Any] = {"flags": ast.PyCF_ONLY_AST | AWAIT | self.futures, "dont_inherit": True}
        try:
            tree: Any = compile(source, name, "exec", **parsing)
        except SyntaxError:
            tree = compile(plain(source), name, "exec", **parsing)
        parts: list[Any] = [(tree, "exec")]
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last: Any = tree.body[-1]
            rest = lines[last.end_lineno - 1 :]
            rest[0] = rest[0].encode()[last.end_col_offset :].decode()
            if not any(";" in line.partition("#")[0] for line in rest):
                parts.append((ast.Expression(tree.body.pop().value), "eval"))
        codes = []
        for part, mode in parts:
            codes.append(compile(part, name, mode, AWAIT | self.futures, dont_inherit=True))
            self.futures |= (
                codes[-1].co_flags & __future__.annotations.compiler_flag
            )  # of `from __future__`, as for a module
        if self.put_off:  # the interrupt came after the request, so it is for this cell
            raise KeyboardInterrupt
        if any(code.co_flags & IS_COROUTINE for code in codes):
            return self.awaited(chained(codes, vars(self.main)))
        for code in codes:
            value = called(eval, code, vars(self.main))
        return value

    def awaited(self, coroutine: Any) -> Any:
        """Run a coroutine to its end, in the event loop that all cells share."""
        import asyncio  # slow to import, and most cells do not need it

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(coroutine)
        try:
            return called(self.loop.run_until_complete, task)
        finally:
            if not task.done():  # the loop was interrupted, and the task must not go on with the next cell
                task.cancel()
                with suppress(BaseException):
                    called(self.loop.run_until_complete, asyncio.wait([task], timeout=1))
            if task.done() and not task.cancelled():
                task.exception()  # or else asyncio warns that nobody has read the exception

    def display(self, *things: Any) -> None:
        """Show things now. This is the function `display` of the cells."""
        for thing in things if self.showing and os.getpid() == self.owner[0] else ():
            self.show(bundle(thing))
        if self.put_off and threading.get_ident() == self.owner[1]:
            self.put_off = False
            called(signal.raise_signal, signal.SIGINT)

    def figures(self) -> None:
        """Show and close every open figure of pyplot."""
        pyplot: Any = sys.modules.get(PYPLOT)
        if self.showing and hasattr(pyplot, "get_fignums"):
            try:
                for number in called(pyplot.get_fignums):
                    self.display(called(pyplot.figure, number))
            finally:
                called(pyplot.close, "all")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Replace the `show` of pyplot when it is imported. Python calls this method, since the kernel is in
        `sys.meta_path`."""
        spec: Any = called(PathFinder.find_spec, name, path) if name == PYPLOT else None
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(pyplot: Any) -> None:
                called(load, pyplot)
                pyplot.show = lambda *_, **__: self.figures()  # not a method, as pyplot sets attributes of it

            spec.loader.exec_module = exec_module
        return spec


class Server(Kernel):
    """A kernel that sends its displays and results as messages."""

    def __init__(self, wire: int) -> None:
        super().__init__()
        self.wire, self.lock, self.current = wire, threading.Lock(), None

    def show(self, shown: dict[str, str], head: str = "") -> None:
        """Send a display as a message."""
        self.send({"id": self.current, "display": shown})

    def send(self, message: dict[str, Any]) -> None:
        """Send one message, either all of it or nothing."""
        data = json.dumps(message, ensure_ascii=False).encode() + b"\n"
        if len(data) > MESSAGE:
            key = "display" if "display" in message else "result"
            note = f"[{', '.join(message[key])}: left out, as a message has at most {MESSAGE >> 20} MiB]"
            return self.send({**message, key: {"text/plain": note}})
        here = threading.get_ident() == self.owner[1]  # the thread that handles signals, perhaps by the cell's handler
        with self.lock:
            handler = signal.signal(signal.SIGINT, self.interrupt) if here else None
            try:
                if message.get("id") == self.current:  # a thread may show something too late
                    write(self.wire, data)
                if "done" in message:
                    self.current, self.showing = None, False
            finally:
                if handler is not None:
                    signal.signal(signal.SIGINT, handler)

    def answer(self, request: dict[str, Any]) -> None:
        """Run the cell of a request, and send the result."""
        begun, self.put_off, self.current = monotonic(), False, request["id"]
        result, error = self.run(f"<cell {self.current}>", request["code"], request.get("display", True))
        about = described(error) if error else None
        for fd in self.streams[1:]:
            with suppress(OSError):
                write(fd, b"\0" + request["barrier"].encode() + b"\n")
        done = {"id": self.current, "done": True, "seconds": monotonic() - begun}
        done["interrupted"] = isinstance(error, KeyboardInterrupt)
        try:
            self.send({**done, "result": result, "error": about})
        except MemoryError as short:
            self.send({**done, "result": None, "error": described(short)})


def serve() -> None:
    """Answer requests from standard input until it ends."""
    requests = os.fdopen(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, HIGH), "rb")
    wire = fcntl.fcntl(3, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, HIGH)  # the old descriptor of the channel, and what was opened meanwhile
    server = Server(wire)
    server.send({"ready": True, "python": ".".join(map(str, sys.version_info[:3]))})
    for line in requests:
        server.answer(json.loads(line))
    os._exit(0)  # even if threads are left


def batch(path: str) -> int:
    """Run the cells of a notebook file, or of a text in which `# %%` begins a cell. Returns the exit code."""
    with io.FileIO(path) as file:
        text = file.read().decode()
    cells = re.split("^# %%.*\n?", text, flags=re.MULTILINE)
    with suppress(ValueError, TypeError, KeyError):  # the file is not a notebook
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    kernel = Kernel()
    del sys.argv[0]
    for number, source in enumerate(filter(str.strip, cells), 1):
        result, error = kernel.run(f"<cell {number}>", source)
        if result is not None:
            kernel.show(result, "Result: ")
        if error is not None:
            write(kernel.streams[2], described(error)["traceback"].encode())
            return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(batch(sys.argv[1]))
    serve()
