"""A program pays for its own processes and for nothing else, however it reads and writes."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from evalpool.schemas.limits import Limits
from evalpool.schemas.settings import settings
from evalpool.worker.sandbox.base import Outcome, Program, Shape
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.sandbox.engine import Engine
from evalpool.worker.tools.languages import PACK, PACKED, UNPACK
from tests.sandbox.test_contract import python

pytestmark = pytest.mark.docker

CODE_IMAGE = "evalpool/code:12"
ROUNDS = 12
"""The number of pairs of runs that are tried, at most. On a busy machine a run may cost more than it would alone, but
not less: so the cheapest run of each kind is what counts, and more runs bring both closer to what they really cost."""
LIMITS = Limits(cpu_seconds=60, output_bytes=16 << 20)
SIZES = [(10, 1), (10, 1 << 20), (3_000, 4096), (20_000, 80), (200_000, 16), (400_000, 1), (400_000, 40)]
"""How many reads or writes a program does, and of how many bytes."""
C = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
double used(int who) {
    struct rusage u;
    getrusage(who, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}
int main(int argc, char **argv) {
    long count = atol(argv[2]), size = atol(argv[3]), done = 0;
    char *piece = malloc(size);
    memset(piece, 'x', size);
    while (count--) {
        if (*argv[1] == 'o') done = write(1, piece, size);
        else for (long got = 0; (done = read(0, piece + got, size - got)) > 0 && (got += done) < size;) ;
        if (done <= 0) return 1;
    }
    fprintf(stderr, "%f\n", used(RUSAGE_SELF) + used(RUSAGE_CHILDREN));
    return 0;
}
"""
PYTHON = """
import os, sys, time
for _ in range(%d): %s
print(time.process_time(), file=sys.stderr)
"""


@pytest.fixture
async def coder(engine: Engine) -> AsyncIterator[DockerBox]:
    """A container with a compiler, and with memory for the large outputs that the agent has to hold here."""
    sandbox = DockerBox(Shape(CODE_IMAGE, 256, 32, 64, 128), engine, settings=settings())
    await sandbox.start()
    yield sandbox
    await sandbox.close()


async def ran(box: DockerBox, program: Program) -> Outcome:
    outcome = await box.run(program)
    assert (outcome.ended, outcome.exit_code) == ("itself", 0), outcome.stderr
    assert await box.reset()
    return outcome


def assert_billed_what_it_used(outcome: Outcome) -> None:
    own = float(outcome.stderr.split()[-1])
    assert outcome.cpu_seconds == pytest.approx(own, rel=0.1, abs=0.02)


@pytest.mark.parametrize(("count", "size"), SIZES)
@pytest.mark.parametrize("way", ["out", "in"])
async def test_a_program_is_billed_for_what_it_used_and_no_more_than_under_bash(
    coder: DockerBox, way: str, count: int, size: int
) -> None:
    make = ("sh", "-c", PACK % "gcc -O2 -o main main.c")
    archive = (await ran(coder, Program(code=C.encode(), main="main.c", argv=make, limits=LIMITS))).stdout
    command = ("./main", way, str(count), str(size))
    line = f"TIMEFORMAT='%U %S'; tar -xf {PACKED}; cat > in; cat in | {{ time {' '.join(command)}; }} | cat > out"

    def program(*argv: str) -> Program:
        stdin = b"x" * (count * size) if way == "in" else b""
        return Program(code=archive, main=PACKED, argv=argv, stdin=stdin, limits=LIMITS)

    ours, bash = [], []
    for _ in range(ROUNDS):
        outcome = await ran(coder, program(*UNPACK, *command))
        assert_billed_what_it_used(outcome)
        ours.append(outcome.cpu_seconds)
        timed = await ran(coder, program("bash", "-c", line))
        bash.append(sum(map(float, timed.stderr.split()[1:])))
        if min(ours) <= 1.1 * min(bash) + 0.02:
            return
    pytest.fail(f"the program was billed {min(ours):.3f} s, but bash says {min(bash):.3f} s")


@pytest.mark.parametrize(
    "line", ["print('x' * 15, flush=True)", "print('x' * 15, file=sys.stderr, flush=True)", "os.read(0, 1)"]
)
async def test_a_python_program_is_not_billed_for_its_readers_and_writers(coder: DockerBox, line: str) -> None:
    assert_billed_what_it_used(await ran(coder, python(PYTHON % (200_000, line), stdin=b"x" * 200_000, limits=LIMITS)))


async def test_the_cpu_limit_counts_the_same_time_as_the_bill(box: DockerBox) -> None:
    """Many small writes make much work for the agent, which does not count against the running program either."""
    code = "import os, time\nwhile time.process_time() < 0.8: os.write(1, b'x')"
    outcome = await box.run(python(code, limits=Limits(cpu_seconds=1, wall_seconds=60, output_bytes=16 << 20)))
    assert (outcome.ended, outcome.exit_code) == ("itself", 0)
    assert outcome.cpu_seconds == pytest.approx(0.8, rel=0.1, abs=0.02)


async def test_an_agent_that_claims_much_for_itself_is_not_believed(box: DockerBox) -> None:
    """The host makes the bill: it deducts no more for the agent than its kernel has counted for the agent's process."""
    heard = box._outcome

    def lying(*arguments: object) -> Outcome:
        return replace(heard(*arguments), cpu_seconds=0.0, agent_seconds=1e6)  # type: ignore[arg-type]

    box._outcome = lying  # type: ignore[method-assign]
    outcome = await box.run(python("import time\nwhile time.process_time() < 0.8: pass"))
    assert outcome.cpu_seconds == pytest.approx(0.8, rel=0.1, abs=0.08)
