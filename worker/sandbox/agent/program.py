"""The job's side of the fork: from a copy of the agent to the program, as another user, nothing of ours in reach."""

import atexit
import builtins
import gc
import importlib.machinery
import io
import os
import sys
import threading
import types

from . import kernel

HOME = "/box"
"""The program's working directory."""


def confine(uid: int, limits: dict[str, float], stdin: int, stdout: int, stderr: int, report: int | None) -> int | None:
    """Leave everything of the agent behind but three streams and, for a check, the report's descriptor."""
    os.setsid()
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the program goes, never the agent
    for target, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, target)
    keep = 3
    if report is not None:
        os.dup2(report, 3, inheritable=False)
        report, keep = 3, 4
    os.closerange(keep, 1024)
    kernel.default_signals()
    os.umask(0o022)
    kernel.set_limits(limits)
    kernel.become(uid)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # as after an exec: /dev/stdout and /proc/self work
    os.chdir(HOME)
    return report


def write_files(files: list[tuple[str, bytes]]) -> None:
    """The job's own files, as the job's own user."""
    for path, content in files:
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def set_environment(env: dict[str, str]) -> None:
    """These variables and no others."""
    os.environ.clear()
    os.environ.update(env)


class Python:
    """Runs a program in this warm interpreter as `python3 main.py` would in a cold one."""

    def __init__(self, source: bytes, check: bytes | None, token: str, args: list[str], report: int | None) -> None:
        self.source, self.check, self.token, self.args, self.report = source, check, token, args, report

    def run(self) -> None:
        """Run to the very end of the process; never returns."""
        main = self._prepare()
        code = 1
        try:
            if self._execute(self.source, f"{HOME}/main.py", main, "syntax") and self.check is not None:
                check, token, report = self.check, self.token, self.report
                del self.check, self.token  # from here on they live in this frame alone
                if self._execute(check, f"{HOME}/check.py", main, "raised", failure="assertion") and report is not None:
                    os.write(report, b"checked " + token.encode())
            code = self._finish(main)
        except SystemExit as leaving:
            code = _exit_code(leaving)
            code = self._finish(main) or code
        except BaseException:  # reported where it was raised
            self._finish(main)
        os._exit(code & 0xFF)

    def _prepare(self) -> types.ModuleType:
        for name in [name for name in sys.modules if name == __package__ or name.startswith(f"{__package__}.")]:
            del sys.modules[name]
        sys.argv = ["main.py", *self.args]
        sys.orig_argv = ["python3", *sys.argv]
        sys.path[0] = HOME
        sys.stdin = _stream(0, "r", "<stdin>", "surrogateescape")
        sys.stdout = _stream(1, "w", "<stdout>", "surrogateescape")
        sys.stderr = _stream(2, "w", "<stderr>", "backslashreplace")
        vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
        main = types.ModuleType("__main__")
        main.__file__ = f"{HOME}/main.py"
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        vars(main).update(__builtins__=builtins, __annotations__={}, __cached__=None)
        sys.modules["__main__"] = main
        return main

    def _execute(self, source: bytes, path: str, main: types.ModuleType, unparsed: str, failure: str = "") -> bool:
        try:
            code = compile(source, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            self._say(unparsed)
            _print_exception(error.with_traceback(None))
            raise
        del source
        try:
            exec(code, vars(main))
        except SystemExit:
            raise
        except BaseException as error:
            if isinstance(error, MemoryError):
                self._say("memory")
            else:
                self._say(failure if failure and isinstance(error, AssertionError) else "raised")
            traceback = error.__traceback__
            _print_exception(error.with_traceback(traceback and traceback.tb_next))  # without our own frame
            raise
        return True

    def _say(self, word: str) -> None:
        if self.report is not None:
            try:
                os.write(self.report, word.encode())
            except OSError:
                pass  # the program closed it: then nothing is said

    def _finish(self, main: types.ModuleType) -> int:
        """What an interpreter does at its end, in its order: threads, exit hooks, streams, the module's objects."""
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        code = _flush()
        for name in [name for name in vars(main) if name != "__builtins__"]:
            vars(main)[name] = None
        gc.collect()
        return _flush() or code


def _flush() -> int:
    code = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            code = 120  # what Python says when its last output could not be written
    return code


def _stream(fd: int, mode: str, name: str, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(fd, mode, closefd=False)
    raw.name = name
    buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    text = io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=fd == 2)
    text.mode = mode  # type: ignore[misc]
    return text


def _print_exception(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        return
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as second:
        sys.__excepthook__(type(second), second, second.__traceback__)


def _exit_code(leaving: SystemExit) -> int:
    code = leaving.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    try:
        sys.stderr.write(f"{code}\n")
    except Exception:
        pass
    return 1
