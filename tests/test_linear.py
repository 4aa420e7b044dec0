"""Whatever a program writes or a caller sends, our side reads it in linear time, up to the largest text there is.

Times are CPU times of this thread and are only compared with each other: sixteen times the text may take sixteen times
as long, and some more for caches and the garbage collector, but not 256 times."""

import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evalpool.api.sandbox import transfer
from evalpool.api.sandbox.output import Output
from evalpool.schemas import InvalidJob, JobSpec, Limits
from evalpool.schemas.packing import pack, unpack
from evalpool.schemas.sandbox import CommandResult, ExecutionStatus
from evalpool.worker.judge import comparators
from evalpool.worker.judge.judge import compile_error, judge, text
from evalpool.worker.sandbox.base import STDOUT
from evalpool.worker.sandbox.stream import Demultiplexer, Stream
from tests.tools.test_judge import outcome

LARGEST = 16 << 20
FACTOR = 16
SLACK = 4
"""How much more than its share a larger text may take."""
COMPARATORS = ("exact", "rstrip", "tokens", "lcb", "float:1e-6", "json", "json:unwrap")
PIECES = (
    "1",
    "1 ",
    "1.",
    ".",
    "-",
    "e",
    "1e",
    "x",
    " ",
    "\n",
    "\r",
    "\r\n",
    "1\n",
    "\x85",
    "é",
    "\0",
    "[",
    "[],",
    '"',
    "\\",
)


def linear(work: Callable[[int], object], largest: int = LARGEST) -> None:
    """Do it with ever larger sizes, and stop at the first that takes too long for its size."""
    sizes = [largest // FACTOR**2, largest // FACTOR, largest]
    before = _seconds(work, sizes[0])
    for size in sizes[1:]:
        took, allowed = _seconds(work, size), SLACK * FACTOR * before + 0.05
        if took > allowed:  # something else may have happened meanwhile
            took = min(took, _seconds(work, size))
        assert took <= allowed, f"{size:,} bytes took {took:.3f} s, a {FACTOR}th of them {before:.4f} s"
        before = took


def _seconds(work: Callable[[int], object], size: int) -> float:
    start = time.thread_time()
    work(size)
    return time.thread_time() - start


def _comparison(comparator: str, piece: str, tail: str, *, alike: bool) -> Callable[[int], object]:
    def work(size: int) -> object:
        got = piece * (size // len(piece)) + tail
        return comparators.difference(comparator, got.encode(), got.rstrip(tail) + "y" if alike else "1")

    return work


@pytest.mark.parametrize(
    ("comparator", "piece", "tail", "alike"),
    [
        ("rstrip", "\r\n", "x", True),
        ("exact", "é", "x", True),
        ("tokens", "x", "x", True),
        ("tokens", "\n", "x", True),
        ("lcb", "1", "x", True),
        ("lcb", "1.", "x", True),
        ("lcb", "\n", "x", True),
        ("float:1e-6", "1", "x", True),
        ("float:1e-6", "1", "x", False),
        ("float:1e-6", "0", "1", False),
        ("float:1e-6", ".", "x", False),
        ("json", "1", "", False),
        ("json", "[", "", False),
        ("json", '"', "", False),
    ],
)
def test_a_comparison_of_the_largest_output_takes_linear_time(
    comparator: str, piece: str, tail: str, alike: bool
) -> None:
    linear(_comparison(comparator, piece, tail, alike=alike))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(COMPARATORS), st.lists(st.sampled_from(PIECES), min_size=1, max_size=3), st.booleans())
def test_a_comparison_of_any_output_takes_linear_time(comparator: str, pieces: list[str], alike: bool) -> None:
    linear(_comparison(comparator, "".join(pieces), "x", alike=alike), 1 << 18)


@pytest.mark.parametrize("piece", [b"\xff", b"\0", b"\xe2\x82", b"\xf0\x9f\x98\x80", b"a"])
def test_a_text_is_decoded_in_pieces_and_comes_out_as_a_whole(piece: bytes) -> None:
    linear(lambda size: text(piece * (size // len(piece))))
    for size in ((1 << 20) - 1, (1 << 20) + 1, (1 << 21) + 2):
        data = (piece * size)[:size]
        assert text(data) == data.decode("utf-8", "replace").replace("\0", "\ufffd")


@pytest.mark.parametrize("piece", [b"error\n", b"\r", b"x", b"(", b"(Error", b'Exception in thread "', b"\xff"])
def test_the_words_of_a_compiler_and_of_a_runtime_are_found_in_linear_time(piece: bytes) -> None:
    spec = JobSpec(code="", tool="multi_code_executor", language="rust_test", limits=Limits(output_bytes=LARGEST))

    def work(size: int) -> object:
        failed: dict[str, Any] = {"exit_code": 1, "stderr": piece * (size // len(piece))}
        said = outcome(stdout=b"test result: o" * (size // 14))
        return judge(outcome(**failed), spec, None), compile_error(outcome(**failed), Limits()), judge(said, spec, None)

    linear(work)


@pytest.mark.parametrize("piece", ["x", "\ufffd", "é\n", "0123456789abcdef"])
def test_a_text_is_packed_in_linear_time(piece: str) -> None:
    linear(lambda size: unpack(pack(piece * (size // len(piece)))))


@pytest.mark.parametrize("frame", [1, 100, 1 << 15])
def test_frames_of_any_size_are_taken_apart_in_linear_time(frame: int) -> None:
    def work(size: int) -> object:
        output = Demultiplexer(size)
        one = struct.pack(">BxxxI", 1, frame) + b"x" * frame
        data = one * (size // len(one))
        for start in range(0, len(data), 1 << 18):
            output.data_received(data[start : start + (1 << 18)])
        assert output.total[1] == len(output.kept[1]) == size // len(one) * frame
        return output

    linear(work, LARGEST if frame > 1 else 1 << 20)


async def test_a_reply_of_the_largest_size_is_put_together_in_linear_time() -> None:
    def work(size: int) -> object:
        stream = Stream()
        reply = stream.expect(size)
        data = struct.pack(">II", 2, size) + b"{}" + b"x" * size
        for start in range(0, len(data), 1 << 10):
            part = data[start : start + (1 << 10)]
            stream.data_received(struct.pack(">BxxxI", 1, len(part)) + part)
        assert len(reply.result()[1]) == size
        return reply

    linear(work)


@pytest.mark.parametrize("piece", [b"\r", b"\n", b"\r\n", b"x"])
def test_the_lines_of_a_command_are_passed_on_in_linear_time(piece: bytes) -> None:
    def work(size: int) -> object:
        lines: list[int] = []
        output = Output("s", lambda _, line: lines.append(len(line)))
        data = piece * (size // len(piece))
        for start in range(0, len(data), 1 << 12):
            output.hear(STDOUT, data[start : start + (1 << 12)])
        return output

    linear(work, 1 << 20)


def test_error_output_of_any_length_from_inside_is_cut() -> None:
    """The output is not even split into lines, which would take a gigabyte of memory."""

    class Complaint(str):
        def splitlines(self, keepends: bool = False) -> list[str]:
            raise AssertionError(f"{len(self)} characters")

    done = CommandResult(command=[], status=ExecutionStatus.ERROR, exit_code=1, stdout="", stderr="")
    done = done.model_copy(update={"stderr": Complaint("\n" * LARGEST + "x" * LARGEST)})
    with pytest.raises(OSError, match="x") as raised:
        transfer.output("file", done)
    assert len(str(raised.value)) < 2000


def test_files_in_deep_folders_are_checked_in_linear_time() -> None:
    def work(size: int) -> object:
        deep = "d/" * 400
        return JobSpec(code="", files={f"{deep}{n}/f": "" for n in range(size // len(deep))})

    linear(work, 4 << 20)


def test_a_comparator_with_a_long_name_is_refused_in_a_short_sentence() -> None:
    with pytest.raises(InvalidJob, match="unknown comparator") as refused:
        JobSpec(code="", cases=[{"stdin": "", "expected": "", "comparator": "float:" + "1" * LARGEST}])
    assert len(str(refused.value)) < 500
