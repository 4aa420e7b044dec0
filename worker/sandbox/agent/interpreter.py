"""Runs a Python program as `python3 main.py` would: in a forked copy of a warm interpreter, or in a cold one.

Imports nothing of ours but words.py, explanation.py and snapshot.py: a cold interpreter is given these four sources
alone, as one text. The check and the token that proves its end are not in this process while the program runs: the
agent puts them into a pipe when it has run, and the token is read from there only after the check's last line.
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
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
if "MAIN" not in globals():
    from .words import BEGUN, CHECK, CHECKED, MAIN, READY
if "explained" not in globals():
    from .explanation import explained, tell
if "tools_of" not in globals():
    from .snapshot import EXTENDED_ARG, MAKERS, NAMES, NO_TOOLS, STORE_GLOBAL, STORE_NAME, globals_of, tools_of

SOLUTION = "solution"
"""The module name of a program of which a function is asked for: `if __name__ == "__main__":` is for scripts."""
FLAT = sys.version_info >= (3, 11)
"""Whether we know the format of this Python's line tables."""


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
    limits: "dict[str, float] | None" = None,
    path: str = MAIN,
) -> None:
    """Run the program and its check, to the end of the process; never returns. `sealed` is the pipe with the check, or
    -1 for none; `tools` are the modules that the check imports.

    From the program's first line to the check's last, nothing is called here but what was bound to a local before, and
    no function of ours: a program can replace what modules hold, even a function's code, but hardly a running frame.
    Hence no comprehension, either: the cells in which it would share our locals can be found, and written to. And hence
    this function is as long as it is: every part that were a function of its own could be replaced.

    The check gets its tools (builtins, and the functions of those modules) as they were before the program. Where it is
    known to be about a `subject`, it sees no other global of the program by the name of a builtin. Where `guarded`, its
    end must find the tools so, too, and no builtin that it uses may have been hidden from it by such a global.
    """
    main, began = _enter(world or prepare(), args, path), time.monotonic()
    space, stage, code, data, check = vars(main), 0, 0, b"", None
    exec_, compile_, read, write, size_of = exec, compile, os.read, os.write, len
    from_bytes, settrace, setprofile, leave = int.from_bytes, sys.settrace, sys.setprofile, os._exit
    common, names, type_, str_, loaded, retype = builtins, NAMES, type, str, sys.modules, object.__setattr__
    bytes_, tuple_, divmod_, zip_, checked = bytes, tuple, divmod, zip, CHECKED
    by_name, by_global, extended = STORE_NAME, STORE_GLOBAL, EXTENDED_ARG
    flatten, function, bases_of = _flat.__code__ if FLAT else None, types.FunctionType, vars(type)["__mro__"].__get__
    known, makers, named = vars(builtins), MAKERS, globals_of.__code__
    kept, texts, modules, classes, cells, spaces = tools_of(tools) if sealed >= 0 else NO_TOOLS
    apart = False
    if subject:  # a function is asked for, so the program must not act as a script
        space["__name__"] = SOLUTION
        sys.modules[SOLUTION] = main
    try:
        file = os.open(path, os.O_RDONLY)
        source = os.read(file, os.fstat(file).st_size)
        os.close(file)
        program = compile_(source, path, "exec", dont_inherit=True)
        if subject and b"global" in source:  # its functions may set one by the name of a builtin when they are called
            apart = not names.isdisjoint({*globals_of(program, False)[0]} - {subject})
        stage = 1
        if path == MAIN:  # a command of a session may have that channel for itself
            write(report, BEGUN)
        exec_(program, space)
        for last in (False, True) if sealed >= 0 else ():
            changed = False
            if last:
                size, token = from_bytes(read(sealed, 4), "big"), b""
                while size_of(data) < size:
                    data += read(sealed, size - size_of(data)) or leave(1)
                check = flat_check = compile_(data, CHECK, "exec", dont_inherit=True)
                if flatten is not None:
                    # A new function each time, with what it calls: the program may have replaced what it can find.
                    called = {"len": size_of, "bytes": bytes_, "tuple": tuple_, "type": type_, "divmod": divmod_}
                    flat = function(flatten, {"__builtins__": called})
                    flat_check = flat(check, flat)
                exec_(flat_check, space)
            else:
                settrace(None)
                setprofile(None)
                stage = 2
                write(report, READY)
                for name in space:
                    if type_(name) is not str_:  # a name that equals whatever is asked for
                        write(report, b"tampered")
                        leave(1)
            # Before the check, what the program has replaced is put back; after it, nothing may have been replaced.
            for holder, _ in spaces:  # first, since such a key would run the program's code when a name is looked for
                for key in holder:
                    if type_(key) is not str_:
                        write(report, b"tampered")
                        leave(1)
            for name, module, kind in modules:
                if type_(module) is not kind:
                    changed = True
                    retype(module, "__class__", kind)
                if not last:
                    loaded[name] = module
            for each, kind, bases, holder, absent, remove in classes:
                if type_(each) is not kind or bases_of(each) is not bases:
                    write(report, b"tampered")
                    leave(1)
                if not absent.isdisjoint(holder):
                    changed = True
                    for name in absent:
                        if name in holder:
                            remove(name)
            for holder, put, name, value in kept:
                if name not in holder or holder[name] is not value:
                    changed = True
                    put(name, value)
            for value, text, defaults, words, pairs in texts:
                if value.__code__ is not text or value.__defaults__ is not defaults:
                    changed = True
                    value.__code__, value.__defaults__ = text, defaults
                if value.__kwdefaults__ is not words:
                    changed = True
                    value.__kwdefaults__ = words
                for name, default in pairs:
                    if name not in words or words[name] is not default:
                        changed = True
                        words[name] = default
            for cell, value in cells:
                if cell.cell_contents is not value:
                    changed = True
                    cell.cell_contents = value
            for holder, absent in spaces:  # by now, the builtins are what they were
                if not holder.keys().isdisjoint(absent):
                    for name in absent:
                        if name in holder and holder[name] is not known[name]:
                            changed = True
                            del holder[name]
            if last:
                if "__builtins__" not in space or space["__builtins__"] is not common:
                    changed = True
                appeared: list[str] = []
                for name in [*space] if subject else ():
                    if type_(name) is not str_:
                        write(report, b"tampered")
                        leave(1)
                    if name in names and name != subject:
                        appeared += (name,)
                if appeared and check:  # the check itself may have defined it
                    around = {"STORE_NAME": by_name, "STORE_GLOBAL": by_global, "EXTENDED_ARG": extended}
                    bound, used = function(named, {"__builtins__": {"zip": zip_, "type": type_}, **around})(check, True)
                    if makers.isdisjoint(used) and ("*",) not in check.co_consts:
                        for name in appeared:
                            if name in used and name not in bound:
                                changed = True
                if changed and guarded:
                    write(report, b"tampered")
                    leave(1)
                while size_of(token) < 32:
                    token += read(sealed, 32 - size_of(token)) or leave(1)  # another process of the program has read it
                write(report, checked + token)
            else:
                space["__builtins__"] = common
                if subject and (apart or not names.isdisjoint(space)):
                    space = {**space}
                    for name in names:
                        if name in space and name != subject:
                            del space[name]
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except KeyboardInterrupt as error:
        _uncaught(error, stage, report, data, check)
        _clear(main, _finish())
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interpreter that was interrupted ends so
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        code = _uncaught(error, stage, report, data, check, limits, began)
    left = _finish()
    if LAST and limits is not None:
        tell(LAST[0], report, limits)
    else:
        left = _clear(main, left)
    os._exit((left or code) & 0xFF)


def _flat(code: types.CodeType, flat: "Any") -> types.CodeType:
    """Return the same code, all on its first line, so that no trace function can jump over a part of it."""
    full, rest = divmod(len(code.co_code) // 2, 8)  # each two bytes of the table cover at most eight code units
    return code.replace(
        co_linetable=b"\xef\0" * full + (bytes((0xE7 + rest, 0)) if rest else b""),
        co_consts=tuple(flat(each, flat) if type(each) is type(code) else each for each in code.co_consts),
    )


def prepare() -> World:
    """Return the world that a program expects. The descriptors 0 to 2 must be pipes by now, though not yet its own: the
    streams ask them whether they can seek."""
    main = types.ModuleType("__main__")
    main.__file__ = MAIN
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", MAIN)
    vars(main).update(__builtins__=builtins, __annotations__={}, __cached__=None)
    stdin = _stream(0, "r", "<stdin>", "surrogateescape")
    stdout = _stream(1, "w", "<stdout>", "surrogateescape")
    return main, stdin, stdout, _stream(2, "w", "<stderr>", "backslashreplace")


def _enter(world: World, args: list[str], path: str) -> types.ModuleType:
    """Make this world the interpreter's own, and return its `__main__`."""
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


def _uncaught(
    error: BaseException,
    stage: int,
    report: int,
    data: bytes,
    check: "types.CodeType | None",
    limits: "dict[str, float] | None" = None,
    began: float = 0.0,
) -> int:
    """Print an error as Python would, without our own frame, and report it in one word for the judge. Return the exit
    code. The explanation of a failed assertion is kept for the end."""
    words = ("syntax", "raised", "assertion" if isinstance(error, AssertionError) else "raised")
    word = "memory" if stage and isinstance(error, MemoryError) else words[stage]
    try:
        os.write(report, word.encode())
    except OSError:
        pass  # the program closed the report: then it says nothing
    traceback = error.__traceback__
    error = error.with_traceback(traceback.tb_next if traceback and stage else None)
    if check is not None and FLAT:
        try:
            LAST.extend(explained(error, data, check, limits, began))
        except BaseException:
            pass  # the program's own doing: its objects may do anything when they are looked at
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as leaving:
        return _exit_code(leaving)
    except BaseException as second:
        sys.__excepthook__(type(second), second, second.__traceback__)
    return 1


def _finish() -> int:
    """Do what an interpreter does at its end, in its order: threads, exit hooks, streams. Return the exit code of
    that."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
    except BaseException as error:
        _ignored(sys.modules["threading"], error)
    atexit._run_exitfuncs()
    return _flush()


def _clear(main: types.ModuleType, code: int) -> int:
    """Do what comes after that: the module's objects end, and what they write is flushed. Return the exit code."""
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


LAST: "list[Any]" = []
"""The explanation of why this program failed its check, if there is one."""
if FLAT:
    run.__code__ = _flat(run.__code__, _flat)
