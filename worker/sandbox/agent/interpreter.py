"""Runs a Python program as `python3 main.py` would: in a forked copy of a warm interpreter, or in a cold one.

Imports nothing of ours, since a cold interpreter is given this source alone. The check and the token that proves its
end are not in this process while the program runs: the agent puts them into a pipe when it has, and the token is read
from there only after the check's last line.
"""

import atexit
import builtins
import gc
import importlib
import importlib.machinery
import io
import os
import signal
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAIN = "/box/main.py"
READY = b"ready "
"""What the harness says when the program has run: only then is the check put into the pipe."""
SOLUTION = "solution"
"""The name of a program of which a function is asked for: `if __name__ == "__main__":` is for scripts."""
FREE = ("print", "input", "open", "help", "exit", "quit", "copyright", "credits", "license")
"""Builtins that a check may well replace, and that decide nothing."""
BUILTINS = tuple(
    (vars(builtins), name, value, None)
    for name, value in vars(builtins).items()
    if callable(value) and name not in FREE
)
NAMES = frozenset(name for name in dir(builtins) if name not in FREE and not name.startswith("__"))


World = tuple[types.ModuleType, io.TextIOWrapper, io.TextIOWrapper, io.TextIOWrapper]
"""A program's own `__main__` and its three streams."""


def run(
    args: list[str],
    report: int,
    sealed: int,
    world: "World | None" = None,
    tools: "list[str] | tuple[str, ...]" = (),
    guarded: bool = True,
    subject: "str | None" = None,
    path: str = MAIN,
) -> None:
    """To the very end of the process; never returns. `sealed` is the pipe with the check, or -1 for none; `tools` are
    the modules that the check imports.

    From the program's first line to the check's last, nothing is called here but what was bound to a local before, and
    no function of ours: a program can replace what modules hold, even a function's code, but hardly a running frame.

    The check gets its tools (builtins, and the functions of those modules) as they were before the program. Where it is
    known to be about a `subject`, it sees no other global of the program by the name of a builtin. Where `guarded`, its
    end must find the tools so, too.
    """
    main = _enter(world or prepare(), args, path)
    space, stage, code = vars(main), 0, 0
    kept, modules, loaded = _tools(tools) if sealed >= 0 else ((), (), {})
    common, names, type_, str_ = builtins, NAMES, type, str
    holders = tuple(vars(module) for _, module in modules)
    if subject:  # a function is asked for, so this is no script: what it would do as one is not wanted
        space["__name__"] = SOLUTION
        sys.modules[SOLUTION] = main
    exec_, compile_, read, write, size_of = exec, compile, os.read, os.write, len
    from_bytes, settrace, setprofile, leave = int.from_bytes, sys.settrace, sys.setprofile, os._exit
    try:
        file = os.open(path, os.O_RDONLY)
        source = os.read(file, os.fstat(file).st_size)
        os.close(file)
        program = compile_(source, path, "exec", dont_inherit=True)
        stage = 1
        exec_(program, space)
        if sealed >= 0:
            settrace(None)
            setprofile(None)
            stage = 2
            write(report, READY)
            for holder in (space, *holders):
                for name in holder:
                    if type_(name) is not str_:  # a name that equals whatever is asked for
                        write(report, b"tampered")
                        leave(1)
            for holder, name, value, text in kept:
                if name not in holder or holder[name] is not value:
                    holder[name] = value
                if text is not None and value.__code__ is not text:
                    value.__code__ = text
            for name, value in modules:
                loaded[name] = value
            space["__builtins__"] = common
            if subject and not names.isdisjoint(space):
                space = {name: value for name, value in space.items() if name not in names or name == subject}
            size, data, token = from_bytes(read(sealed, 4), "big"), b"", b""
            while size_of(data) < size:
                data += read(sealed, size - size_of(data)) or leave(1)
            exec_(compile_(data, "/box/check.py", "exec", dont_inherit=True), space)
            for holder in holders:
                for name in holder:
                    if type_(name) is not str_:
                        write(report, b"tampered")
                        leave(1)
            for holder, name, value, text in kept if guarded else ():
                if name not in holder or holder[name] is not value or (text and value.__code__ is not text):
                    write(report, b"tampered")
                    leave(1)
            while size_of(token) < 32:
                token += read(sealed, 32 - size_of(token)) or leave(1)  # another process of the program has read it
            write(report, b"checked " + token)
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except KeyboardInterrupt as error:
        _uncaught(error, stage, report)
        _finish(main)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # so ends an interpreter that was interrupted
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        code = _uncaught(error, stage, report)
    code = _finish(main) or code
    os._exit(code & 0xFF)


def _tools(names: "list[str] | tuple[str, ...]") -> "tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]":
    """What checks call, and where it is found: (namespace, name, value, code) of each; the modules; all modules."""
    kept: list[Any] = [*BUILTINS]
    modules: list[Any] = [("builtins", builtins)]
    for module in names:
        try:
            space = vars(importlib.import_module(module))
        except Exception:
            continue  # then the check will say so
        modules.append((module, sys.modules[module]))
        tools = [(name, value) for name, value in space.items() if callable(value) and name not in FREE]
        kept += [(space, name, value, getattr(value, "__code__", None)) for name, value in tools]
    return tuple(kept), tuple(modules), sys.modules


def prepare() -> World:
    """The world a program expects, made before it is there. The descriptors 0 to 2 must be pipes by now, though not yet
    its own: what is made here asks them whether they can seek."""
    main = types.ModuleType("__main__")
    main.__file__ = MAIN
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", MAIN)
    vars(main).update(__builtins__=builtins, __annotations__={}, __cached__=None)
    stdin = _stream(0, "r", "<stdin>", "surrogateescape")
    stdout = _stream(1, "w", "<stdout>", "surrogateescape")
    return main, stdin, stdout, _stream(2, "w", "<stderr>", "backslashreplace")


def _enter(world: World, args: list[str], path: str) -> types.ModuleType:
    """Make it the real one."""
    if path != MAIN:
        world[0].__file__ = path
    main, sys.stdin, sys.stdout, sys.stderr = world
    if sys.__stdout__ is not sys.stdout:  # a warm interpreter has done it for all programs
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = world[1:]  # type: ignore[misc]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["main.py" if path == MAIN else path, *args]
    sys.orig_argv = ["python3", *sys.argv]
    sys.path[0] = os.getcwd()
    sys.modules["__main__"] = main
    return main


def _uncaught(error: BaseException, stage: int, report: int) -> int:
    """Print it as Python would, without our own frame, and note it in one word for the judge."""
    words = ("syntax", "raised", "assertion" if isinstance(error, AssertionError) else "raised")
    word = "memory" if stage and isinstance(error, MemoryError) else words[stage]
    try:
        os.write(report, word.encode())
    except OSError:
        pass  # the program closed it: then nothing is said
    traceback = error.__traceback__
    error = error.with_traceback(traceback.tb_next if traceback and stage else None)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as leaving:
        return _exit_code(leaving)
    except BaseException as second:
        sys.__excepthook__(type(second), second, second.__traceback__)
    return 1


def _finish(main: types.ModuleType) -> int:
    """What an interpreter does at its end, in its order: threads, exit hooks, streams, the module's objects."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
    except BaseException as error:
        _ignored(sys.modules["threading"], error)
    atexit._run_exitfuncs()
    code = _flush()
    for name in [name for name in vars(main) if name != "__builtins__"]:
        vars(main)[name] = None
    gc.collect()
    return code or _flush()


def _flush() -> int:
    code = 0
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException as error:
            code = 120  # what Python says when its last output could not be written
            _ignored(stream, error)
    return code


def _ignored(what: object, error: BaseException) -> None:
    os.write(2, f"Exception ignored in: {what!r}\n{type(error).__name__}: {error}\n".encode())


def _stream(fd: int, mode: str, name: str, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(fd, mode, closefd=False)
    raw.name = name
    buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    text = io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=fd == 2)
    text.mode = mode  # type: ignore[misc]
    return text


def _exit_code(leaving: SystemExit) -> int:
    code = leaving.code
    if code is None or isinstance(code, int):
        return (code or 0) if -(1 << 63) <= (code or 0) < 1 << 63 else -1  # as C has it
    try:
        sys.stderr.write(f"{code}\n")
    except Exception:
        pass
    return 1
