"""Code on the host that reads bytes of a program or of a caller takes time that is linear in their number.

Times are CPU times and are only compared with others of the same test, so a busy machine changes nothing.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from evalpool.schemas import Limits
from evalpool.worker.judge.judge import compile_error, syntax_error, text
from evalpool.worker.sandbox.base import SIDE, STDOUT, Outcome, Running
from evalpool.worker.tools import notebook
from evalpool.worker.tools.files import FileOperation, confined
from evalpool.worker.tools.languages import SCANNED, classes
from evalpool.worker.tools.notebook import Cell, Kernel

MIB = 1 << 20
GROWTH = 10
"""How much longer four times the input may take: 4 is linear, 16 is quadratic."""
SLACK = 0.05
"""Shorter times, in seconds, cannot be measured."""

JAVA = {
    "open braces": ("", "{"),
    "pairs of braces": ("", "{}"),
    "parentheses": ("", "("),
    "empty texts": ("", '""'),
    "open texts": ("", '"a'),
    "quotes": ("", "'"),
    "lines with a quote": ("", '"\n'),
    "backslashes": ('"', "\\"),
    "blocks of text": ("", '"""'),
    "a block of text without an end": ('"""', "a"),
    "escaped quotes that end in a backslash": ('"""', '\n\\"""'),
    "comments": ("", "/**/"),
    "a comment without an end": ("/*", "*"),
    "slashes": ("", "/ "),
    "words": ("", "a "),
    "one word": ("", "a"),
    "dots": ("package ", "."),
    "operators": ("", "+"),
    "lines": ("", "\n"),
    "classes": ("", "public class A {"),
    "main methods": ("", "class A{static void main(String[] a){}}"),
}
MESSAGES = {
    "a text": (b'{"a": "', b"x", b'"}'),
    "escapes": (b'{"a": "', b"\\n", b'"}'),
    "code points": (b'{"a": "', b"\\u00e9", b'"}'),
    "other letters": (b'{"a": "', "é".encode(), b'"}'),
    "bytes that are not UTF-8": (b'{"a": "', b"\xff", b'"}'),
    "a text without an end": (b'{"a": "', b'\\"', b""),
    "texts": (b"[", b'"",', b'""]'),
    "digits": (b'{"a": ', b"1", b"}"),
    "a fraction": (b'{"a": 1.', b"1", b"}"),
    "an exponent": (b'{"a": 1e', b"1", b"}"),
    "lists": (b"", b"[", b""),
    "objects": (b"", b'{"a":', b""),
    "carriage returns": (b"", b"\r", b""),
    "spaces": (b"{", b" ", b"}"),
    "letters": (b"", b"x", b""),
}


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of a call, the better of two."""
    times = []
    for _ in range(2):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


def assert_linear(work: Callable[[int], Callable[[], object]]) -> None:
    little, much = seconds(work(4 * MIB)), seconds(work(16 * MIB))
    assert much < GROWTH * little + SLACK, f"{little:.3f} s for 4 MiB, {much:.3f} s for 16 MiB"


@pytest.mark.parametrize("form", JAVA)
def test_classes_are_found_in_linear_time(form: str) -> None:
    head, body = JAVA[form]
    assert_linear(lambda size: lambda: classes.__wrapped__(head + body * (size // len(body)) + "\\"))


@pytest.mark.parametrize("form", JAVA)
def test_classes_are_found_in_a_few_passes(form: str) -> None:
    head, body = JAVA[form]
    code = (head + body * (SCANNED // len(body)))[:SCANNED]

    def pass_once() -> None:
        for _ in code:
            pass

    assert seconds(lambda: classes.__wrapped__(code)) < 30 * seconds(pass_once) + SLACK


@pytest.mark.parametrize("form", MESSAGES)
def test_messages_of_a_notebook_are_read_in_linear_time(form: str) -> None:
    head, body, tail = MESSAGES[form]
    room = len(head) + len(tail)
    assert_linear(lambda size: lambda: notebook._parsed(head + body * ((size - room) // len(body)) + tail))


def test_a_message_of_full_size_is_read_and_a_crowded_or_larger_one_is_not() -> None:
    head, tail = b'{"a": "', b'"}'
    full = head + b"x" * (notebook.LARGE - len(head) - len(tail)) + tail
    assert notebook._parsed(full) == {"a": "x" * (notebook.LARGE - len(head) - len(tail))}
    assert notebook._parsed(full[:-2] + b"x" + tail) is None
    assert notebook._parsed(b"[" + b"1," * notebook.SMALL + b"1]") is None
    assert notebook._parsed(b"[" + b'"a text of twenty bytes",' * (notebook.PARTS + 1) + b"1]") is None


class Silent(Running):
    """A command that only notes whether it was stopped."""

    stopped = False

    def feed(self, data: bytes, *, last: bool = False) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize("noise", [b"\r", b"\n", b"x\n", b"{\n", b"{}\n", b"[[[[\n", b'{"a":\n', b"\r\n"])
async def test_lines_that_are_not_messages_cost_little_or_stop_the_cell(noise: bytes) -> None:
    async def heard(size: int) -> tuple[float, Silent]:
        kernel: Any = Kernel()
        kernel._running, kernel._cell, kernel._room = Silent(), Cell(MIB), notebook.CELL_BYTES
        chunk, began = noise * (65536 // len(noise)), time.thread_time()
        for _ in range(size // len(chunk)):
            if kernel._running.stopped:
                break
            kernel._hear(SIDE, chunk)
        return time.thread_time() - began, kernel._running

    whole, running = await heard(16 * MIB)
    loop = seconds(lambda: [None for _ in range(16 * MIB)])
    assert whole < 5 * loop + SLACK
    assert running.stopped or not noise.strip()


@pytest.mark.parametrize("piece", [b"\0", b"\0" + b"0" * 24, b"\r", b"\xff", b"x" * 100])
async def test_the_output_of_a_cell_is_read_in_linear_time(piece: bytes) -> None:
    def work(size: int) -> Callable[[], object]:
        def hear() -> str:
            kernel: Any = Kernel()
            kernel._running, kernel._cell = Silent(), Cell(16 * MIB)
            kernel._barrier = b"\0" + b"a" * 24 + b"\n"
            for _ in range(size // 4096):
                kernel._hear(STDOUT, piece * (4096 // len(piece)))
            return str(kernel._cell.stdout)

        return hear

    assert_linear(work)


@pytest.mark.parametrize("part", ["a/", "/", "../", "a/../", "./", "a"])
def test_paths_are_confined_in_linear_time(part: str) -> None:
    assert_linear(lambda size: lambda: confined(part * (size // len(part)), "/box"))


@pytest.mark.parametrize("name", ["encoding", "file_path"])
async def test_names_are_bounded(name: str) -> None:
    given = {"operation": "read", "file_path": "x", name: "x" * MIB}
    refused = await FileOperation()(None, given)  # type: ignore[arg-type]
    assert str(refused.error).startswith(f"Invalid input: {name}")
    assert len(str(refused.error)) < 1000


@pytest.mark.parametrize("line", [b"error\n", b"\n", b"\xff", b"\r", b"x", b"\0"])
def test_the_messages_of_a_compiler_are_read_in_linear_time(line: bytes) -> None:
    failed = replace(Outcome.killed_for_memory(0), exit_code=1, signal=None, oom_kills=0)
    for read in (compile_error, syntax_error):
        assert_linear(
            lambda size, read=read: lambda: read(replace(failed, stderr=line * (size // len(line))), Limits())
        )  # type: ignore[misc]
    assert_linear(lambda size: lambda: text(line * (size // len(line))))
