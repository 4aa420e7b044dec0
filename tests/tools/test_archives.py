"""The compiled program is found in its archive without unpacking it."""

import gzip
import io
import tarfile

import pytest

from evalpool.schemas import Case, JobSpec
from evalpool.worker.tools.code import MultiCodeExecutor
from evalpool.worker.tools.languages import MEMBERS, PACKED, binary

PROGRAM = bytes(range(256)) * 5


def archive(*members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data) if kind == tarfile.REGTYPE else 0, kind
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def test_the_program_is_found_among_other_files() -> None:
    assert binary(archive(("main", PROGRAM))) == PROGRAM
    assert binary(archive(("main.c", b"x" * 513), ("empty", b""), ("main", PROGRAM), ("z", b"z"))) == PROGRAM


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"\0" * 10240,
        archive(("main.exe", PROGRAM)),
        archive(("main", PROGRAM))[:600],
        archive(("main", b""), kind=tarfile.SYMTYPE),
        archive(*((f"a{number}", b"") for number in range(MEMBERS)), ("main", PROGRAM)),
        gzip.compress(archive(("main", PROGRAM))),
        archive(("main", PROGRAM)).replace(b"00000002400", b"\x80\0\0\0\0\0\0\0\0\0\7", 1),
        archive(("main", PROGRAM)).replace(b"00000002400", b"00000009400", 1),
    ],
)
def test_unusual_archives_are_left_to_tar(odd: bytes) -> None:
    assert binary(odd) is None


def test_an_archive_is_unpacked_for_every_case_only_if_its_program_cannot_run_by_itself() -> None:
    tool, made = MultiCodeExecutor(), archive(("main", PROGRAM))
    for language, alone in (("c", True), ("rust", True), ("java", False)):
        spec = JobSpec(code="class A {}", tool=tool.name, language=language, cases=[Case("1", "1")])
        program = tool.program(spec, spec.cases[0], made)
        assert (program.executable, program.code == PROGRAM) == (alone, alone)
        assert program.main == ("main" if alone else PACKED)
