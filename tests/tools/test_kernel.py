"""The kernel as the host sees it: a process with pipes. Real plots are drawn where there is a real matplotlib."""

import base64
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from evalpool.worker.tools.notebook import source

SOURCE = source()
PATIENCE = 60.0

PYPLOT = """
from matplotlib.figure import Figure

open_ = {}

def figure(number=None):
    show.__signature__ = "that of the backend"
    number = number or max(open_, default=0) + 1
    return open_.setdefault(number, Figure(number))

def get_fignums():
    return sorted(open_)

def close(which):
    open_.clear()

def show():
    raise RuntimeError("it has no screen")
"""
FIGURE = """
class Figure:
    def __init__(self, number):
        self.number = number
    def savefig(self, file, format, bbox_inches):
        if self.number > 8:
            raise ValueError("cannot be drawn")
        file.write(b"PNG %d" % self.number)
    def __repr__(self):
        return f"<Figure {self.number}>"
"""


@dataclass
class Seen:
    """The messages and outputs of one cell."""

    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, str]] = field(default_factory=list)
    done: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> str | None:
        """The result as text."""
        return self.done["result"] and self.done["result"]["text/plain"]

    @property
    def error(self) -> str | None:
        """The name of the error that ended the cell."""
        return self.done["error"] and self.done["error"]["name"]

    @property
    def traceback(self) -> str:
        return str(self.done["error"]["traceback"])


class Notebook:
    """A kernel in a process of its own."""

    def __init__(self, folder: Path) -> None:
        wire, end = os.pipe()
        command = ["bash", "-c", f'exec "$0" -c "$1" 3>&{end} {end}>&-', sys.executable, SOURCE]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=[end], cwd=folder, env={"PATH": os.environ["PATH"]}
        )
        os.close(end)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.output: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        self.changed = threading.Condition()
        self.messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.number = 0
        self.threads = [
            threading.Thread(target=self._listen, args=[wire]),
            threading.Thread(target=self._read, args=["stdout", self.process.stdout.fileno()]),
            threading.Thread(target=self._read, args=["stderr", self.process.stderr.fileno()]),
        ]
        for thread in self.threads:
            thread.start()
        self.ready = self.hear()

    def _listen(self, wire: int) -> None:
        with open(wire, "rb") as lines:
            for line in lines:
                self.messages.put(json.loads(line))
        self.messages.put(None)

    def _read(self, name: str, fd: int) -> None:
        while data := os.read(fd, 1 << 16):
            with self.changed:
                self.output[name] += data
                self.changed.notify_all()

    def hear(self) -> dict[str, Any]:
        """Return the next message."""
        message = self.messages.get(timeout=PATIENCE)
        assert message is not None, f"the kernel is gone: {self.output['stderr'].decode()}"
        return message

    def until(self, name: str, text: bytes) -> bytes:
        """Return what came on this stream before this text."""
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.output[name], PATIENCE), self.output[name][-1000:]
            before, _, self.output[name] = self.output[name].partition(text)
        return before

    def ask(self, code: str, **more: Any) -> str:
        """Send a cell, and return its barrier."""
        self.number += 1
        barrier = secrets.token_hex(12)
        assert self.process.stdin is not None
        request = {"id": self.number, "code": code, "barrier": barrier, **more}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return barrier

    def answer(self, barrier: str) -> Seen:
        """Wait for the end of a cell, and return what came of it."""
        seen = Seen()
        while not seen.done:
            message = self.hear()
            assert message["id"] == self.number
            if "display" in message:
                assert message.keys() == {"id", "display"}
                seen.displays.append(message["display"])
            else:
                assert message.keys() == {"id", "done", "result", "error", "interrupted", "seconds"}
                assert message["done"] is True
                seen.done = message
        end = b"\0" + barrier.encode() + b"\n"
        seen.stdout, seen.stderr = (self.until(name, end).decode() for name in ("stdout", "stderr"))
        return seen

    def cell(self, code: str, **more: Any) -> Seen:
        """Run a cell to its end."""
        return self.answer(self.ask(code, **more))

    def close(self) -> None:
        """End the kernel, if it has not ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait(PATIENCE)
        for thread in self.threads:
            thread.join(PATIENCE)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.close()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# ------------------------------------------------------------------------------------------------------- the protocol


def test_the_kernel_sends_ready_and_ends_with_its_input(notebook: Notebook) -> None:
    assert notebook.ready == {"ready": True, "python": "{}.{}.{}".format(*sys.version_info)}
    notebook.cell("import threading, time; threading.Thread(target=time.sleep, args=[999]).start()")
    assert notebook.process.stdin is not None
    notebook.process.stdin.close()
    assert notebook.process.wait(PATIENCE) == 0
    assert notebook.messages.get(timeout=PATIENCE) is None


def test_a_cell_returns_its_output_its_result_and_its_run_time(notebook: Notebook) -> None:
    seen = notebook.cell("import sys, time\ntime.sleep(0.2)\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert (seen.stdout, seen.stderr, seen.displays) == ("out\n", "err\n", [])
    assert seen.done["result"] == {"text/plain": "42"}
    assert seen.done["error"] is None
    assert seen.done["interrupted"] is False
    assert 0.2 <= seen.done["seconds"] < PATIENCE


def test_output_arrives_while_the_cell_runs(notebook: Notebook, tmp_path: Path) -> None:
    barrier = notebook.ask("import os, time\nprint('one')\nos.system('echo two')\nwhile not os.path.exists('go'): pass")
    assert notebook.until("stdout", b"two\n") == b"one\n"
    assert notebook.messages.empty()
    (tmp_path / "go").touch()
    assert notebook.answer(barrier).error is None


def test_everything_a_cell_printed_comes_before_its_barrier(notebook: Notebook) -> None:
    code = "import subprocess, sys\nprint('a' * 300_000, end='')\nsubprocess.run(['sh', '-c', 'echo b; echo c >&2'])"
    for _ in range(3):
        seen = notebook.cell(code + "\nsys.stdout.write('d'); sys.stderr.write('e');")
        assert sorted(seen.stdout) == sorted("a" * 300_000 + "b\nd")
        assert seen.stderr == "c\ne"


def test_cells_have_no_input_and_cannot_reach_the_kernels_own_channel(notebook: Notebook) -> None:
    seen = notebook.cell("input('? ')")
    assert (seen.error, seen.stdout) == ("EOFError", "? ")
    assert notebook.cell("import subprocess; subprocess.run(['cat'], capture_output=True).stdout").plain == "b''"
    listing = "import os\n[fd for fd in range(3, 64) if os.path.exists(f'/proc/self/fd/{fd}')]"
    assert notebook.cell(listing).plain == "[]"
    assert notebook.cell("os.listdir('/proc/self/fd')").error is None
    inherited = "subprocess.run(['sh', '-c', 'ls /proc/$$/fd'], close_fds=False, capture_output=True).stdout.split()"
    assert notebook.cell(inherited).plain == "[b'0', b'1', b'2']"
    seen = notebook.cell("os.write(3, b'garbage')")
    assert seen.error == "OSError"


def test_nothing_is_displayed_if_the_request_says_so(notebook: Notebook) -> None:
    seen = notebook.cell("print('out'); display(1); 2", display=False)
    assert (seen.stdout, seen.displays, seen.done["result"]) == ("out\n", [], None)
    assert notebook.cell("1 / 0", display=False).error == "ZeroDivisionError"
    assert notebook.cell("display(3); 4", display=True).displays == [{"text/plain": "3"}]


def test_a_kernel_that_kills_itself_sends_no_more_messages(notebook: Notebook) -> None:
    notebook.ask("import os; os.kill(os.getpid(), 9)")
    assert notebook.messages.get(timeout=PATIENCE) is None
    assert notebook.process.wait(PATIENCE) == -9


# -------------------------------------------------------------------------------------------------- running as Jupyter


def test_cells_share_the_state_of_the_main_module(notebook: Notebook) -> None:
    notebook.cell("import pickle, sys\nfrom dataclasses import dataclass\n@dataclass\nclass Point:\n    x: 'int' = 1")
    assert notebook.cell("pickle.loads(pickle.dumps(Point(5))).x").plain == "5"
    assert notebook.cell("__name__, Point.__module__, sys.modules['__main__'].Point is Point").plain == (
        "('__main__', '__main__', True)"
    )
    assert notebook.cell("[name for name in dir() if not name.startswith('_')]").plain == (
        "['Point', 'dataclass', 'pickle', 'sys']"
    )
    assert notebook.cell("import inspect\ndef f(): pass\ninspect.getsource(f)").plain == repr("def f(): pass\n")
    assert notebook.cell("del sys.modules['__main__']").error is None
    assert notebook.cell("pickle.loads(pickle.dumps(Point())).x").plain == "1"


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("1 + 1", "2"),
        ("'text'", "'text'"),
        ("None", None),
        ("x = 5", None),
        ("print()", None),
        ("", None),
        ("# nothing", None),
        ("1;", None),
        ("(1); # over", None),
        ("(1,\n 2\n)  # ; not here\n# ; nor here", "(1, 2)"),
        ("'a;'", "'a;'"),
        ("'é;' ; 'ü'", "'ü'"),
        ("x = 1; x", "1"),
        ("if True:\n    3", None),
        ("(yield_ := 4)", "4"),
    ],
)
def test_the_last_expression_is_the_result_unless_a_semicolon_follows(
    notebook: Notebook, code: str, result: str | None
) -> None:
    seen = notebook.cell(code)
    assert seen.error is None
    assert seen.plain == result


def test_the_last_result_is_named_underscore(notebook: Notebook) -> None:
    notebook.cell("20")
    notebook.cell("30;")
    notebook.cell("None")
    assert notebook.cell("_ + 1").plain == "21"


def test_a_future_import_holds_for_later_cells(notebook: Notebook) -> None:
    assert notebook.cell("def f(x: nothing): pass").error == "NameError"
    notebook.cell("from __future__ import annotations")
    assert notebook.cell("def f(x: nothing): pass\nf.__annotations__").plain == "{'x': 'nothing'}"


def test_cells_can_await_and_share_a_loop(notebook: Notebook) -> None:
    notebook.cell(
        "import asyncio\nasync def tick():\n    await asyncio.sleep(0.01)\n    return 7\n"
        "loop, task = asyncio.get_running_loop() if await tick() else None, asyncio.create_task(tick())"
    )
    assert notebook.cell("await task").plain == "7"
    assert notebook.cell("(await tick()) + 1;").plain is None
    assert notebook.cell("asyncio.get_running_loop() is loop, await tick()").plain == "(True, 7)"
    assert notebook.cell("asyncio.run(tick())").plain == "7"
    assert notebook.cell("[x async for x in aiter_()]").error == "NameError"
    seen = notebook.cell("async def bad():\n    await tick()\n    1 / 0\nawait bad()")
    assert seen.error == "ZeroDivisionError"
    assert "asyncio" not in seen.traceback
    assert seen.traceback.count("File") == 2
    assert notebook.cell("await asyncio.gather(tick(), tick())").plain == "[7, 7]"
    assert notebook.cell("loop.close()").error is None
    assert notebook.cell("await tick()").plain == "7"
    assert notebook.cell("tick()").plain.startswith("<coroutine object tick")  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------------------- errors


def test_a_traceback_names_the_cell_and_shows_its_lines_and_nothing_of_the_kernel(notebook: Notebook) -> None:
    notebook.cell("def divide(x):\n    return 1 / x")
    seen = notebook.cell("print('before')\ntry:\n    divide(0)\nexcept ZeroDivisionError:\n    {}['key']")
    assert seen.stdout == "before\n"
    assert (seen.error, seen.done["error"]["value"], seen.done["interrupted"]) == ("KeyError", "'key'", False)
    lines = [line for line in seen.traceback.splitlines() if "^" not in line]
    assert lines == [
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 3, in <module>',
        "    divide(0)",
        '  File "<cell 1>", line 2, in divide',
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 5, in <module>',
        "    {}['key']",
        "KeyError: 'key'",
    ]


def test_frames_between_the_cells_are_left_out_too(notebook: Notebook) -> None:
    seen = notebook.cell("class Bad:\n    def __repr__(self):\n        exec('1 / 0')\ndisplay(Bad())")
    names = [line.split(",")[0].strip() for line in seen.traceback.splitlines() if "File" in line]
    assert names == ['File "<cell 1>"', 'File "<cell 1>"', 'File "<string>"']
    seen = notebook.cell("Bad()")
    assert next(line for line in seen.traceback.splitlines() if "File" in line).endswith("in __repr__")


@pytest.mark.parametrize("code", ["1 +", "def f(:", "return 1", "x = 'open", "  indented", "await = 1"])
def test_a_syntax_error_is_an_error_of_the_cell(notebook: Notebook, code: str) -> None:
    seen = notebook.cell("print('never')\n" + code)
    assert seen.stdout == ""
    assert seen.error in {"SyntaxError", "IndentationError"}
    assert seen.traceback.startswith('  File "<cell 1>", line 2')
    assert "<string>" not in seen.traceback


@pytest.mark.parametrize(
    ("code", "name", "value"),
    [
        ("import sys; sys.exit(3)", "SystemExit", "3"),
        ("exit()", "SystemExit", "None"),
        ("raise GeneratorExit", "GeneratorExit", ""),
        ("class Odd(BaseException): pass\nraise Odd(1, 2)", "Odd", "(1, 2)"),
        ("class Odd(Exception):\n    def __str__(self): raise SystemExit\nraise Odd", "Odd", "<unprintable Odd>"),
        ("class Odd(Exception):\n    exceptions = 5\nraise Odd(6)", "Odd", "6"),
        ("def f(): f()\nf()", "RecursionError", "maximum recursion depth exceeded"),
        ("e = ValueError(1)\ne.__cause__ = ValueError(2)\ne.__cause__.__cause__ = e\nraise e", "ValueError", "1"),
        ("raise type('L' * 5000, (Exception,), {})('x')", "L" * 1000, "x"),
        ("assert False, '\\ud800'", "AssertionError", "\\ud800"),
    ],
)
def test_any_exception_is_an_error_of_the_cell_and_the_kernel_goes_on(
    notebook: Notebook, code: str, name: str, value: str
) -> None:
    seen = notebook.cell("state = 1")
    seen = notebook.cell(code)
    assert (seen.error, seen.done["error"]["value"]) == (name, value)
    assert "<cell 2>" in seen.traceback
    assert "<string>" not in seen.traceback
    assert notebook.cell("print(state)").stdout == "1\n"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no groups of exceptions")
def test_tracebacks_of_an_exception_group_show_nothing_of_the_kernel(notebook: Notebook) -> None:
    code = (
        "class Bad:\n    def __repr__(self): raise KeyError(5)\ntry:\n    display(Bad())\n"
        "except KeyError as e:\n    raise ExceptionGroup('both', [e, ValueError(6)])"
    )
    seen = notebook.cell(code)
    assert seen.error == "ExceptionGroup"
    assert "KeyError: 5" in seen.traceback
    assert "ValueError: 6" in seen.traceback
    assert "<string>" not in seen.traceback


# -------------------------------------------------------------------------------------------------------- rich results

RICH = """
class Rich:
    def __repr__(self): return "plain"
    def _repr_html_(self): return "<b>html</b>"
    def _repr_markdown_(self): return "*md*"
    def _repr_latex_(self): return None
    def _repr_svg_(self): return "<svg/>"
    def _repr_png_(self): return b"png", {"width": 3}
    def _repr_jpeg_(self): return b"jpeg"
    def _repr_json_(self): return {"a": [1]}
class Bundled:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": "bundled", "image/png": b"png", "application/x": {"a": 1}}, {"meta": 0}
class Anything:
    def __getattr__(self, name): return lambda *args: name
    def __repr__(self): return "anything"
"""
RICHES = {
    "text/plain": "plain",
    "text/html": "<b>html</b>",
    "text/markdown": "*md*",
    "image/svg+xml": b64(b"<svg/>"),
    "image/png": b64(b"png"),
    "image/jpeg": b64(b"jpeg"),
    "application/json": '{"a": [1]}',
}


def test_a_result_comes_in_every_form_that_its_class_offers(notebook: Notebook) -> None:
    notebook.cell(RICH)
    assert notebook.cell("Rich()").done["result"] == RICHES
    assert notebook.cell("Rich").done["result"] == {"text/plain": "<class '__main__.Rich'>"}
    bundled = {"text/plain": "bundled", "image/png": b64(b"png"), "application/x": '{"a": 1}'}
    assert notebook.cell("Bundled()").done["result"] == bundled
    assert notebook.cell("Anything()").done["result"] == {"text/plain": "anything"}


def test_displays_come_in_order_and_before_the_end_of_the_cell(notebook: Notebook) -> None:
    notebook.cell(RICH)
    seen = notebook.cell("for n in range(3): display(n)\ndisplay(Rich(), 'x')\ndisplay()\n5")
    assert seen.displays == [{"text/plain": text} for text in "012"] + [RICHES, {"text/plain": "'x'"}]
    assert seen.plain == "5"
    seen = notebook.cell("def f():\n    display('in a function')\nf()\n1 / 0")
    assert seen.displays == [{"text/plain": "'in a function'"}]
    assert seen.error == "ZeroDivisionError"


@pytest.mark.parametrize(
    "raised", ["ValueError(1)", "SystemExit", "KeyboardInterrupt", "type('B', (BaseException,), {})"]
)
@pytest.mark.parametrize("method", ["__repr__", "_repr_html_", "_repr_mimebundle_"])
def test_a_form_that_raises_is_an_error_of_the_cell(notebook: Notebook, method: str, raised: str) -> None:
    notebook.cell(f"class Bad:\n    def {method}(self, **_): raise {raised}")
    name = raised.partition("(")[0] if raised[0] != "t" else "B"
    assert notebook.cell("Bad()").error == name
    assert notebook.cell("display(Bad())").error == name
    assert (
        notebook.cell("try:\n    display(Bad())\nexcept BaseException as e:\n    print('caught')").stdout == "caught\n"
    )


def test_texts_are_cut_at_a_mebibyte(notebook: Notebook) -> None:
    mebi = 1 << 20
    plain = notebook.cell("'x' * 5_000_000").plain
    assert plain is not None
    assert plain.startswith("'xxx")
    assert mebi < len(plain) < mebi + 100
    assert plain.endswith("[cut: it has 5000002 characters]")
    wide = notebook.cell("'é' * 1_000_000").plain
    assert wide is not None
    assert mebi < len(wide.encode()) < mebi + 100
    seen = notebook.cell("raise ValueError('\\x01' * 3_000_000)")
    assert all(len(seen.done["error"][key]) < mebi + 100 for key in ("value", "traceback"))
    assert "[cut: " in seen.traceback
    html = "class H:\n    def _repr_html_(self): return '<' * 2_000_000\ndisplay(H())"
    assert len(notebook.cell(html).displays[0]["text/html"]) < mebi + 100


def test_a_message_that_is_too_large_is_replaced_by_a_note(notebook: Notebook) -> None:
    notebook.cell("class Image:\n    size = 13_000_000\n    def _repr_png_(self): return bytes(self.size)")
    seen = notebook.cell("display(Image())\nImage()")
    assert seen.displays == [seen.done["result"]]
    assert seen.plain == "[image/png, text/plain: left out, as a message has at most 16 MiB]"
    seen = notebook.cell("Image.size = 12_000_000; display(Image())")
    assert len(seen.displays[0]["image/png"]) == 16_000_000


# -------------------------------------------------------------------------------------------------------------- plots


@pytest.fixture
def plots(notebook: Notebook, tmp_path: Path) -> Notebook:
    """A kernel in which a module that looks like matplotlib can be imported."""
    package = tmp_path / "matplotlib"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "figure.py").write_text(FIGURE)
    (package / "pyplot.py").write_text(PYPLOT)
    return notebook


def plot(number: int) -> dict[str, str]:
    return {"image/png": b64(b"PNG %d" % number), "text/plain": f"<Figure {number}>"}


def test_open_figures_are_shown_at_the_end_of_the_cell_and_closed(plots: Notebook) -> None:
    seen = plots.cell("import matplotlib.pyplot as plt\nplt.figure()\nplt.figure();")
    assert seen.displays == [plot(1), plot(2)]
    assert plots.cell("plt.get_fignums()").plain == "[]"
    assert plots.cell("plt.figure(); 1 / 0").displays == [plot(1)]
    assert plots.cell("plt.figure();", display=False).displays == []
    assert plots.cell("1").displays == [plot(1)]


def test_show_displays_the_open_figures_at_once(plots: Notebook) -> None:
    code = (
        "from matplotlib.pyplot import figure, show\nfigure()\nshow()\ndisplay('between')\nfigure()\nshow(block=True)"
    )
    seen = plots.cell(code)
    assert (seen.stderr, seen.error) == ("", None)
    assert seen.displays == [plot(1), {"text/plain": "'between'"}, plot(1)]


def test_a_figure_can_be_displayed_like_anything_else(plots: Notebook) -> None:
    assert plots.cell("from matplotlib.figure import Figure\ndisplay(Figure(5))").displays == [plot(5)]
    assert plots.cell("Figure(6)").done["result"] == plot(6)


def test_a_figure_that_cannot_be_drawn_is_an_error_of_one_cell_only(plots: Notebook) -> None:
    seen = plots.cell("import matplotlib.pyplot as plt\nplt.open_[9] = plt.figure(); plt.open_[9].number = 9;")
    assert (seen.error, seen.done["error"]["value"]) == ("ValueError", "cannot be drawn")
    seen = plots.cell("plt.get_fignums()")
    assert (seen.error, seen.plain) == (None, "[]")


def test_plots_work_with_a_pyplot_module_that_a_cell_provides(notebook: Notebook) -> None:
    code = (
        "import sys, types\n"
        "figure, plt = types.ModuleType('matplotlib.figure'), types.ModuleType('matplotlib.pyplot')\n"
        f"exec({FIGURE!r}, vars(figure))\n"
        "plt.get_fignums, plt.figure, closed = lambda: [1, 2], figure.Figure, []\n"
        "plt.close = closed.append\n"
        "sys.modules.update({'matplotlib.figure': figure, 'matplotlib.pyplot': plt})"
    )
    assert notebook.cell(code).displays == [plot(1), plot(2)]
    assert notebook.cell("del sys.modules['matplotlib.pyplot']\nclosed").plain == "['all']"


def test_the_matplotlib_backend_is_agg_unless_the_environment_names_another(notebook: Notebook) -> None:
    assert notebook.cell("import os; os.environ['MPLBACKEND']").plain == "'Agg'"


# ---------------------------------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize(
    "waiting",
    [
        "while True: pass",
        "import time; time.sleep(999)",
        "import subprocess; subprocess.run(['sleep', '999'])",
        "import asyncio; await asyncio.sleep(999)",
        "import asyncio\nasync def spin():\n    while True: pass\nawait spin()",
        "class Slow:\n    def __repr__(self):\n        while True: pass\nSlow()",
        "class Slow:\n    def __repr__(self):\n        while True: pass\ndisplay(Slow())",
        "import threading; threading.Event().wait()",
        "class Slow:\n    def write(self, text):\n        while True: pass\nprint(1, file=Slow())",
    ],
)
def test_an_interrupt_ends_the_cell_and_keeps_the_state(notebook: Notebook, waiting: str) -> None:
    notebook.cell("state = 5")
    barrier = notebook.ask(f"print('begun')\n{waiting}")
    notebook.until("stdout", b"begun\n")
    time.sleep(0.3)
    notebook.process.send_signal(signal.SIGINT)
    seen = notebook.answer(barrier)
    assert (seen.error, seen.done["interrupted"]) == ("KeyboardInterrupt", True)
    assert '"<string>"' not in seen.traceback
    assert notebook.cell("state").plain == "5"
    assert notebook.cell("import asyncio; await asyncio.sleep(0.01)").error is None
    assert notebook.output["stderr"] == b""


def test_a_cell_may_catch_an_interrupt_and_be_interrupted_again(notebook: Notebook) -> None:
    loop = "try:\n    print('begun')\n    while True: pass\nexcept KeyboardInterrupt:\n    print('caught')\n"
    barrier = notebook.ask(loop + "while True: pass")
    notebook.until("stdout", b"begun\n")
    notebook.process.send_signal(signal.SIGINT)
    notebook.until("stdout", b"caught\n")
    notebook.process.send_signal(signal.SIGINT)
    assert notebook.answer(barrier).done["interrupted"]
    barrier = notebook.ask(loop + "'done'")
    notebook.until("stdout", b"begun\n")
    notebook.process.send_signal(signal.SIGINT)
    seen = notebook.answer(barrier)
    assert (seen.plain, seen.error, seen.done["interrupted"]) == ("'done'", None, False)


def test_an_interrupt_between_cells_is_harmless(notebook: Notebook) -> None:
    for _ in range(20):
        notebook.process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    seen = notebook.cell("1")
    assert (seen.plain, seen.error) == ("1", None)


def test_no_message_is_lost_or_broken_by_interrupts(notebook: Notebook) -> None:
    stop = threading.Event()

    def interrupt() -> None:
        while not stop.wait(0.002):
            notebook.process.send_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        for _ in range(60):
            seen = notebook.cell("for n in range(5): display('x' * 200_000)\nprint('end')\n'y' * 200_000")
            assert all(shown["text/plain"] == repr("x" * 200_000) for shown in seen.displays)
            if seen.error is None:
                assert (len(seen.displays), seen.stdout) == (5, "end\n")
                assert seen.plain == repr("y" * 200_000)
            else:
                assert seen.error == "KeyboardInterrupt"
    finally:
        stop.set()
        thread.join()
    time.sleep(0.1)
    assert notebook.cell("'after'").plain == "'after'"


def test_a_signal_handler_of_a_cell_holds_for_that_cell_only(notebook: Notebook) -> None:
    code = "import signal\ndef mine(*_): raise OSError('mine')\nsignal.signal(signal.SIGINT, mine)\nprint('begun')\n"
    barrier = notebook.ask(code + "while True: display('x' * 100_000)")
    notebook.until("stdout", b"begun\n")
    notebook.process.send_signal(signal.SIGINT)
    seen = notebook.answer(barrier)
    assert (seen.error, seen.done["error"]["value"], seen.done["interrupted"]) == ("OSError", "mine", False)
    barrier = notebook.ask("print('begun')\nwhile True: pass")
    notebook.until("stdout", b"begun\n")
    notebook.process.send_signal(signal.SIGINT)
    assert notebook.answer(barrier).done["interrupted"]
    notebook.cell("signal.signal(signal.SIGINT, signal.SIG_DFL)")
    notebook.process.send_signal(signal.SIGINT)
    assert notebook.cell("1").plain == "1"


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    "mistake",
    [
        "import sys; sys.stdout = None; sys.stderr = None; sys.stdin = None",
        "import sys; del sys.stdout",
        "import sys; sys.stdout.close(); sys.stderr.close(); sys.stdin.close()",
        "import sys; sys.__stdout__ = sys.stdout = None",
        "import os; os.close(0); os.close(1); os.close(2)",
        "import os; os.set_blocking(1, False); print('x' * 3_000_000)",
        "import sys\nclass Out:\n    closed = property(lambda _: 1 / 0)\n    def write(self, text): pass\n"
        "    def flush(self): raise SystemExit\nsys.stderr = Out()",
        "import sys; sys.setrecursionlimit(60)",
        "import signal; signal.signal(signal.SIGALRM, lambda *_: 1 / 0); signal.setitimer(signal.ITIMER_REAL, 0.05)",
        "import sys; sys.settrace(lambda *_: 1 / 0)",
        "import sys; sys.setprofile(lambda *_: 1 / 0)",
        "import builtins; del builtins.display",
        "import linecache, sys; linecache.clearcache(); sys.modules.clear()",
        "import sys; sys.modules['matplotlib.pyplot'] = sys.modules['matplotlib.figure'] = None",
        "import threading; threading.main_thread = None",
        "import sys; sys.meta_path.clear()",
        "import os; os.environ.clear(); os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
        "def f(n): f(n + 1)\nf(0)",
        "x = []\nfor _ in range(100_000): x = [x]\nx",
        "raise SystemExit",
    ],
)
def test_after_a_mistake_the_next_cell_works(notebook: Notebook, mistake: str) -> None:
    notebook.cell("state = 5")
    notebook.ask(mistake)
    while "done" not in notebook.hear():
        pass
    time.sleep(0.1)
    seen = notebook.cell("print('out'); state")
    assert seen.stdout.endswith("out\n")
    assert (seen.plain, seen.error) == ("5", None)
    assert notebook.messages.empty()


def test_the_barrier_comes_even_if_the_cell_redirects_its_descriptors(notebook: Notebook, tmp_path: Path) -> None:
    seen = notebook.cell("import os; os.dup2(os.open('log', os.O_CREAT | os.O_WRONLY), 1); print('logged')")
    assert seen.stdout == ""
    assert (tmp_path / "log").read_text() == "logged\n"


def test_a_stream_that_a_cell_has_replaced_stays(notebook: Notebook) -> None:
    notebook.cell("import io, sys; sys.stdout = kept = io.StringIO()")
    assert notebook.cell("print('kept')").stdout == ""
    assert notebook.cell("kept.getvalue()").plain == repr("kept\n")
    assert notebook.cell("kept.close()").error is None
    assert notebook.cell("print('back')").stdout == "back\n"


def test_threads_may_go_on_but_show_nothing_between_cells(notebook: Notebook) -> None:
    code = (
        "import threading, time\nstop = False\ndef chatter():\n    while not stop:\n"
        "        print('chatter'); display('shown'); time.sleep(0.001)\n"
        "threads = [threading.Thread(target=chatter) for _ in range(3)]\nfor thread in threads: thread.start()"
    )
    notebook.cell(code)
    for _ in range(30):
        assert notebook.cell("time.sleep(0.005); 1").plain == "1"
        time.sleep(0.005)
    seen = notebook.cell("stop = True\nfor thread in threads: thread.join()")
    assert {shown["text/plain"] for shown in seen.displays} <= {"'shown'"}
    assert notebook.cell("2").displays == []


def test_a_forked_child_ends_with_the_cell_and_sends_no_message(notebook: Notebook) -> None:
    seen = notebook.cell(
        "import os\npid = os.fork()\nif not pid: print('child'); display('child')\nelse: os.waitpid(pid, 0)"
    )
    assert (seen.stdout, seen.displays) == ("child\n", [])
    seen = notebook.cell(
        "pid = os.fork()\nif not pid: raise ValueError('child')\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    )
    assert seen.plain == "1"
    assert "ValueError: child" in seen.stderr
    notebook.cell("import multiprocessing; pool = multiprocessing.get_context('fork').Pool(2)")
    assert notebook.cell("with pool: print(pool.map(abs, [-1, -2]))").stdout == "[1, 2]\n"
    assert notebook.messages.empty()


def test_large_outputs_arrive_complete(notebook: Notebook) -> None:
    seen = notebook.cell("for n in range(20_000): print(n, 'x' * 100)\nfor n in range(500): display(n)")
    assert seen.stdout.count("\n") == 20_000
    assert len(seen.displays) == 500


# --------------------------------------------------------------------------------------------------------------- files


def batch(folder: Path, text: str, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "main.py").write_text(text)
    command = [sys.executable, "-c", SOURCE, "main.py", *args]
    return subprocess.run(
        command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_the_cells_of_a_text_are_run_and_their_results_shown_as_text(tmp_path: Path) -> None:
    ended = batch(
        tmp_path,
        "import sys\nx = 5\n# %% the second\nprint('printed', input(), sys.argv)\nx + 1\n"
        "# %%\ndisplay('shown', x)\nx;\n"
        "# %% [markdown]\n# words\n\n#%% is only a comment\n# %%\nprint('last', end='')\n'a\\nb'\n",
        "one",
        stdin="given\n",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "printed given ['main.py', 'one']\nResult: 6\n'shown'\n5\nlastResult: 'a\\nb'\n"


def test_images_are_shown_as_their_type_and_size(tmp_path: Path) -> None:
    ended = batch(
        tmp_path,
        "class Image:\n    def _repr_png_(self): return b'12345'\n    def __repr__(self): return 'image'\n"
        "display(Image())\nprint('x')\n# %%\nImage()\n",
    )
    assert ended.stdout == "[image/png, 5 bytes]\nx\nResult: image\n[image/png, 5 bytes]\n"


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("class Bad:\n    def __repr__(self): 1 / 0\nBad()", "ZeroDivisionError: division by zero"),
    ],
)
def test_the_first_error_ends_a_batch(tmp_path: Path, wrong: str, line: str) -> None:
    ended = batch(tmp_path, f"print('first')\n# %%\n{wrong}\n# %%\nprint('never')")
    assert (ended.returncode, ended.stdout) == (1, "first\n")
    assert '"<cell 2>"' in ended.stderr
    assert '"<string>"' not in ended.stderr
    assert ended.stderr.splitlines()[-1] == line


def test_the_code_cells_of_a_notebook_file_are_run(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n"]},
        {"cell_type": "code", "source": ["x = 1\n", "# %%\n", "x"], "outputs": []},
        {"cell_type": "code", "source": "x + 1"},
        {"cell_type": "code", "source": []},
        {"cell_type": "code", "source": ["await missing"]},
    ]
    ended = batch(tmp_path, json.dumps({"cells": cells, "nbformat": 4}))
    assert ended.stdout == "Result: 1\nResult: 2\n"
    assert ended.returncode == 1
    assert "NameError" in ended.stderr
    assert batch(tmp_path, "{'cells': 3}").stdout == "Result: {'cells': 3}\n"
    assert batch(tmp_path, '{"cells": 3}').stdout == "Result: {'cells': 3}\n"


def test_a_batch_has_plots_and_an_event_loop(tmp_path: Path) -> None:
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").touch()
    (tmp_path / "matplotlib" / "figure.py").write_text(FIGURE)
    (tmp_path / "matplotlib" / "pyplot.py").write_text(PYPLOT)
    text = "import asyncio, matplotlib.pyplot as plt\nplt.figure()\nplt.show()\nplt.figure()\nawait asyncio.sleep(0, 7)"
    assert batch(tmp_path, text).stdout == "[image/png, 5 bytes]\n[image/png, 5 bytes]\nResult: 7\n"


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SOURCE, "nowhere.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 1
    assert "No such file" in ended.stderr


# -- what notebooks write besides Python -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("%matplotlib inline\nx = 1\n!echo $((x + 41))\n", "41\n"),
        ("%%bash\nfor x in 1 2; do\n  echo $x\ndone", "1\n2\n"),
        ("for _ in range(2):\n    !echo again", "again\nagain\n"),
        ("text = '''\n!echo no\n'''\nprint(len(text))", "10\n"),
    ],
)
def test_shell_lines_and_magics_of_notebooks_are_understood(notebook: Notebook, code: str, printed: str) -> None:
    seen = notebook.cell(code)
    assert (seen.done["error"], seen.stdout) == (None, printed)


def test_unknown_magics_are_syntax_errors_and_display_can_be_imported(notebook: Notebook) -> None:
    for unknown in ("%nonsense", "%pip install x", "%sh ls", "%%time\n1 + 1", "%%writefile f\nx"):
        error = notebook.cell(unknown).done["error"]
        assert (error["name"], unknown.split()[0] in error["value"]) == ("SyntaxError", True), unknown
    seen = notebook.cell("from IPython.display import HTML, display\ndisplay(HTML('<b>x</b>'))")
    assert seen.displays == [{"text/html": "<b>x</b>", "text/plain": "<HTML>"}]
