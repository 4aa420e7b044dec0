"""The kernel of a notebook: it runs cells one after another in one namespace, as Jupyter does.

Started inside a sandbox as `python3 -c SOURCE`, with mime.py before it, so it imports nothing of ours then, and runs on
any Python since 3.9. Requests are lines of JSON on standard input: `id`, `code`, `barrier`, and `display`: if that is
false, nothing is shown but what is printed. Replies are lines of JSON on descriptor 3: first `ready`; then for each
request any number of `display`, and one `done`, whatever the cell does, as long as this process lives. Before that, the
barrier goes where cells print, to descriptors 1 and 2: when it has come, all of their output has. With a FILE as
argument it runs the cells of that, up to the first error.
"""

from __future__ import annotations
import __future__

import ast
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
import types
from contextlib import suppress
from importlib.machinery import PathFinder
from time import monotonic
from typing import Any

from worker.tools.mime import OURS, bundle, called, described, flush, plain, stand_in, write

MESSAGE = 16 << 20  # the most bytes of one message
HIGH = 200  # our own descriptors are above this, out of the way of cells
PYPLOT = "matplotlib.pyplot"
AWAIT, IS_COROUTINE = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, 0x80


async def chained(codes: list[types.CodeType], space: dict[str, Any]) -> Any:
    """The parts of a cell that awaits something: all of them see the loop run. A door to the cell's code, too."""
    for code in codes:
        value = eval(code, space)
        value = await value if code.co_flags & IS_COROUTINE else value
    return value


class Kernel:
    """What stays from cell to cell, and what is put right between them."""

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
        sys.path.insert(0, "")  # for cells, as in any interpreter; but no file there took the place of our own imports
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        signal.signal(signal.SIGINT, self.interrupt)

    def show(self, shown: dict[str, str], head: str = "") -> None:
        """As text, in between what the cell prints."""
        images = [(mime, data) for mime, data in shown.items() if mime.startswith("image/")]
        lines = [f"[{mime}, {len(data) * 3 // 4 - data[-2:].count('=')} bytes]" for mime, data in images]
        if head or not images:
            lines.insert(0, head + shown["text/plain"])
        flush()
        write(self.streams[1], "".join(f"{line}\n" for line in lines).encode())

    def interrupt(self, _: int, frame: types.FrameType | None) -> None:
        """SIGINT ends code of the cell at once, and waits while our own runs, which must not be left half done."""
        while frame is not None and frame.f_globals is not OURS:
            frame = frame.f_back
        if frame is not None and frame.f_code in (called.__code__, chained.__code__):
            raise KeyboardInterrupt
        self.put_off = True

    def run(self, name: str, source: str, showing: bool = True) -> tuple[dict[str, str] | None, BaseException | None]:
        """What its last expression is, and what ended it if it did not reach its end."""
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
        if os.getpid() != self.owner[0]:  # a child that the cell has forked, and that has come to the cell's end
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
        """Before a cell: what was closed is open again. What cells have replaced stays as they want it."""
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
        """After a cell: nothing that it has left behind breaks into our own code."""
        signal.signal(signal.SIGINT, self.interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.settrace(None)
        sys.setprofile(None)
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000))

    def evaluate(self, name: str, source: str) -> Any:
        """The value of its last expression, unless a semicolon follows."""
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
        if self.put_off:  # it came after the request, and so is meant for this cell
            raise KeyboardInterrupt
        if any(code.co_flags & IS_COROUTINE for code in codes):
            return self.awaited(chained(codes, vars(self.main)))
        for code in codes:
            value = called(eval, code, vars(self.main))
        return value

    def awaited(self, coroutine: Any) -> Any:
        """Run to its end, in the event loop of all cells."""
        import asyncio  # slow to load, and most cells do without

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(coroutine)
        try:
            return called(self.loop.run_until_complete, task)
        finally:
            if not task.done():  # an interrupt that met the loop: the task must not go on with the next cell
                task.cancel()
                with suppress(BaseException):
                    called(self.loop.run_until_complete, asyncio.wait([task], timeout=1))
            if task.done() and not task.cancelled():
                task.exception()  # else asyncio complains that nobody has looked

    def display(self, *things: Any) -> None:
        """Show them now: the `display` of the cells."""
        for thing in things if self.showing and os.getpid() == self.owner[0] else ():
            self.show(bundle(thing))
        if self.put_off and threading.get_ident() == self.owner[1]:
            self.put_off = False
            called(signal.raise_signal, signal.SIGINT)

    def figures(self) -> None:
        """Show every open figure and close it."""
        pyplot: Any = sys.modules.get(PYPLOT)
        if self.showing and hasattr(pyplot, "get_fignums"):
            try:
                for number in called(pyplot.get_fignums):
                    self.display(called(pyplot.figure, number))
            finally:
                called(pyplot.close, "all")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Asked at imports, as we are in `sys.meta_path`: pyplot's `show` is ours as soon as it is loaded."""
        spec: Any = called(PathFinder.find_spec, name, path) if name == PYPLOT else None
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(pyplot: Any) -> None:
                called(load, pyplot)
                pyplot.show = lambda *_, **__: self.figures()  # no method, as pyplot sets attributes of it

            spec.loader.exec_module = exec_module
        return spec


class Server(Kernel):
    """A kernel with a wire."""

    def __init__(self, wire: int) -> None:
        super().__init__()
        self.wire, self.lock, self.current = wire, threading.Lock(), None

    def show(self, shown: dict[str, str], head: str = "") -> None:
        """As a message."""
        self.send({"id": self.current, "display": shown})

    def send(self, message: dict[str, Any]) -> None:
        """One message, whole or not at all."""
        data = json.dumps(message, ensure_ascii=False).encode() + b"\n"
        if len(data) > MESSAGE:
            key = "display" if "display" in message else "result"
            note = f"[{', '.join(message[key])}: left out, as a message has at most {MESSAGE >> 20} MiB]"
            return self.send({**message, key: {"text/plain": note}})
        here = threading.get_ident() == self.owner[1]  # where signals are handled, maybe by the cell
        with self.lock:
            handler = signal.signal(signal.SIGINT, self.interrupt) if here else None
            try:
                if message.get("id") == self.current:  # a thread may come too late with what it has to show
                    write(self.wire, data)
                if "done" in message:
                    self.current, self.showing = None, False
            finally:
                if handler is not None:
                    signal.signal(signal.SIGINT, handler)

    def answer(self, request: dict[str, Any]) -> None:
        """Run a cell."""
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
    """Requests from standard input, until it ends."""
    requests = os.fdopen(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, HIGH), "rb")
    wire = fcntl.fcntl(3, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, HIGH)  # the wire's old number, and what was opened on the way
    server = Server(wire)
    server.send({"ready": True, "python": ".".join(map(str, sys.version_info[:3]))})
    for line in requests:
        server.answer(json.loads(line))
    os._exit(0)  # whatever threads are left


def batch(path: str) -> int:
    """The cells of a notebook, or of a text where `# %%` begins each. Returns the exit code."""
    with io.FileIO(path) as file:
        text = file.read().decode()
    cells = re.split("^# %%.*\n?", text, flags=re.MULTILINE)
    with suppress(ValueError, TypeError, KeyError):  # it is no notebook
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
