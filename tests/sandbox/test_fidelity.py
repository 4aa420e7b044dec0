"""A program cannot tell the warm interpreter from `python3 main.py`: same output, same errors, same end."""

import re

import pytest

from evalpool.worker.sandbox.base import Program
from evalpool.worker.sandbox.docker import DockerBox
from tests.sandbox.test_contract import python

pytestmark = pytest.mark.docker

# ruff: noqa: E501 - programs are data

PROGRAMS = {
    "main": "print(__name__, __file__, __spec__, __package__, __doc__, sorted(globals()))",
    "docstring": "'''words'''\nprint(__doc__)",
    "argv": "import sys; print(sys.argv, sys.path[0], sys.flags, sys.orig_argv[-1])",
    "streams": "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n"
    "    print(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.isatty(), s.fileno(), s.buffer.raw)",
    "process": "import os; print(os.getcwd(), os.getpgrp() == os.getsid(0), os.umask(0), [os.environ[n] for n in ('HOME', 'LANG', 'PATH')])",
    "limits": "import resource as r; print([r.getrlimit(n) for n in (r.RLIMIT_NOFILE, r.RLIMIT_CORE, r.RLIMIT_FSIZE)])",
    "signals": "import signal; print([(s, signal.getsignal(s)) for s in sorted(signal.valid_signals())][:40], "
    "signal.pthread_sigmask(0, ()))",
    "traceback": "def f(x):\n    return 1 / x\nf(0)",
    "chained": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e",
    "group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "syntax": "x = (1,\nprint(",
    "indent": "if 1:\npass",
    "cookie": "# -*- coding: latin-1 -*-\nprint('\xe9')",
    "bom": "\ufeffprint('bom')",
    "exit": "raise SystemExit(3)",
    "exit word": "import sys; sys.exit('bye')",
    "exit none": "import sys; print('x'); sys.exit()",
    "exit huge": "import sys; sys.exit(10**100)",
    "exit negative": "import sys; sys.exit(-3)",
    "exit bool": "import sys; sys.exit(True)",
    "exit big": "import sys; sys.exit(300)",
    "os exit": "import os; print('lost'); os._exit(4)",
    "abort": "import os; os.abort()",
    "segv": "import ctypes; ctypes.string_at(0)",
    "self kill": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "raise KeyboardInterrupt",
    "end of input": "print(input()); input()",
    "reads all": "import sys; print(repr(sys.stdin.read())); print(repr(sys.stdin.readline()))",
    "binary input": "import sys; print(sys.stdin.buffer.read())",
    "device files": "open('/dev/stdout', 'w').write('out\\n'); open('/dev/stderr', 'w').write('err\\n'); print(open('/dev/stdin').read(4))",
    "unflushed": "print('a', end=''); import sys; sys.stderr.write('b')",
    "atexit": "import atexit\natexit.register(print, 1)\natexit.register(print, 2)\nprint(0)",
    "atexit raises": "import atexit\natexit.register(lambda: 1/0)\nprint(0)",
    "threads": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.05), print('t'))).start()\nprint('m')",
    "daemon": "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()\nprint('m')",
    "thread raises": "import threading\nt = threading.Thread(target=lambda: 1/0, name='T')\nt.start()\nt.join()",
    "del": "class A:\n    def __del__(self): print('del')\na = A()\nprint('end')",
    "cycle": "class A:\n    def __del__(self): print('del')\na = A(); a.a = a\ndel a\nprint('end')",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1/0",
    "closed stdout": "import sys; sys.stdout.close(); print('x')",
    "closed fd": "import os; os.close(1); print('x')",
    "recursion": "def f(): f()\ntry: f()\nexcept RecursionError as e: print(e)",
    "future": "from __future__ import annotations\ndef f(x: nope): pass\nprint(f.__annotations__)",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
    "dataclass": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nprint(A(1))",
    "multiprocessing": "import multiprocessing as m\ndef f(x): return x * x\n"
    "if __name__ == '__main__':\n    for c in ('fork', 'spawn'):\n        with m.get_context(c).Pool(2) as p: print(p.map(f, [1, 2, 3]))",
    "subprocess": "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True))",
    "asyncio": "import asyncio\nasync def f(): await asyncio.sleep(0); return 1\nprint(asyncio.run(f()))",
    "futures": "from concurrent.futures import ThreadPoolExecutor as T\nwith T() as t: print(list(t.map(abs, [-1])))",
    "import self": "import main\nprint(main.__name__, main is __import__('__main__'))",
    "warnings": "import warnings; warnings.warn('w')",
    "hash": "print(hash('a'), {'a', 'b', 'c'})",
    "inspect": "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))",
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_warm_and_cold_interpreters_behave_like_plain_python(box: DockerBox, name: str) -> None:
    code = PROGRAMS[name]
    source = code.encode("latin-1" if name == "cookie" else "utf-8") if isinstance(code, str) else code
    given = {"args": ("1", "b c"), "stdin": b"line\nrest\xff"}
    programs = {
        "plain": Program(code=b'exec python3 main.py "$@"', main="run.sh", argv=("bash", "run.sh"), files={"main.py": source}, **given),  # type: ignore[arg-type]
        "warm": Program(code=source, main="main.py", **given),  # type: ignore[arg-type]
        "cold": Program(code=source, main="main.py", argv=("python3",), **given),  # type: ignore[arg-type]
    }  # fmt: skip
    seen = {}
    for kind, program in programs.items():
        outcome = await box.run(program)
        stderr = re.sub("0x[0-9a-f]+", "0x", outcome.stderr.decode())
        seen[kind] = (outcome.exit_code, outcome.signal, outcome.stdout.decode(), stderr)
        assert await box.reset()
    assert seen["warm"] == seen["plain"]
    assert seen["cold"] == seen["plain"]


async def test_variables_for_the_interpreter_itself_are_honoured(box: DockerBox) -> None:
    outcome = await box.run(
        python("import sys; print(sys.flags.optimize)", env={"PYTHONOPTIMIZE": "2"}, check=b"print(3)")
    )
    assert (outcome.stdout, outcome.checked) == (b"2\n3\n", True)
