"""The lines of a command are passed on as they come, however its bytes are cut."""

from hypothesis import given
from hypothesis import strategies as st

from evalpool.api.sandbox.output import Output
from evalpool.worker.sandbox.base import STDOUT, Command, End, Note, Outcome

ENDED = Outcome(
    ended=End.ITSELF, exit_code=0, signal=None, checked=False, note=Note.NONE, stdout=b"", stderr=b"", stdout_total=0,
    stderr_total=0, wall_seconds=0, cpu_seconds=0, memory_bytes=0, oom_kills=0, processes=1,
)  # fmt: skip


def heard(parts: list[bytes]) -> tuple[list[str], list[str]]:
    """The lines that were passed on before the command's end, and all of them."""
    lines: list[str] = []
    output = Output("s", lambda _, line: lines.append(line))
    for part in parts:
        output.hear(STDOUT, part)
    early = list(lines)
    output.result(Command(argv=("x",)), ENDED, "utf-8")
    return early, lines


def test_lines_that_end_with_a_carriage_return_are_passed_on_as_they_come() -> None:
    early, lines = heard([b"1 %\r2 %\r", b"3 %\r", b"4"])
    assert early == ["1 %", "2 %", "3 %"]
    assert lines == [*early, "4"]


@given(st.lists(st.text(st.sampled_from("a\r\n"), max_size=4).map(str.encode), max_size=6))
def test_the_chunks_of_output_make_no_difference(parts: list[bytes]) -> None:
    assert heard(parts)[1] == b"".join(parts).decode().splitlines()
