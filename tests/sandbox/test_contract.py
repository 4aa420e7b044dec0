"""What every sandbox promises, whatever it is made of."""

import asyncio

import pytest

from schemas import Limits, SandboxLost
from worker.sandbox.base import Program, Sandbox


def python(code: str, **more: object) -> Program:
    return Program(code=code.encode(), main="main.py", **more)  # type: ignore[arg-type]


def bash(code: str, **more: object) -> Program:
    return Program(code=code.encode(), main="main.sh", argv=("bash", "main.sh"), **more)  # type: ignore[arg-type]


async def test_a_program_reads_and_writes(sandbox: Sandbox) -> None:
    outcome = await sandbox.run(python("import sys; print(input()); print('no', file=sys.stderr)", stdin=b"hi\n"))
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("itself", 0, None)
    assert (outcome.stdout, outcome.stderr) == (b"hi\n", b"no\n")
    assert (outcome.stdout_total, outcome.stderr_total) == (3, 3)


async def test_it_is_given_arguments_environment_and_files(sandbox: Sandbox) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['A'], open('d/x').read())"
    outcome = await sandbox.run(python(code, args=("1", "b c"), env={"A": "ü"}, files={"d/x": b"data"}))
    assert outcome.stdout.decode() == "['1', 'b c'] ü data\n"


async def test_shell_scripts_run_too(sandbox: Sandbox) -> None:
    outcome = await sandbox.run(bash('read x; echo "$1 $x"; exit 3', args=("a",), stdin=b"b\n"))
    assert (outcome.stdout, outcome.exit_code) == (b"a b\n", 3)


@pytest.mark.parametrize(
    ("code", "exit_code", "signal", "said"),
    [
        ("raise SystemExit(5)", 5, None, ""),
        ("1/0", 1, None, "raised"),
        ("x =", 1, None, "syntax"),
        ("raise MemoryError", 1, None, "memory"),
        ("import os; os.kill(os.getpid(), 11)", None, 11, ""),
        ("import os; os._exit(0)", 0, None, ""),
    ],
)
async def test_ends_are_told_apart(
    sandbox: Sandbox, code: str, exit_code: int | None, signal: int | None, said: str
) -> None:
    outcome = await sandbox.run(python(code))
    assert (outcome.exit_code, outcome.signal, outcome.said) == (exit_code, signal, said)


@pytest.mark.parametrize(
    ("code", "checked", "said"),
    [
        ("def f(): return 1", True, ""),
        ("def f(): return 2", False, "assertion"),
        ("def f(): return 1/0", False, "raised"),
        ("def f(): raise SystemExit(0)", False, ""),
        ("import sys; sys.exit(0)", False, ""),
        ("import os; os._exit(0)", False, ""),
    ],
)
async def test_a_check_is_done_only_when_it_ran_to_its_end(
    sandbox: Sandbox, code: str, checked: bool, said: str
) -> None:
    outcome = await sandbox.run(python(code, check=b"assert f() == 1"))
    assert (outcome.checked, outcome.said) == (checked, said)


async def test_cpu_time_is_limited(sandbox: Sandbox) -> None:
    outcome = await sandbox.run(python("while True: pass", limits=Limits(cpu_seconds=1, wall_seconds=60)))
    assert outcome.ended == "cpu"
    assert outcome.cpu_seconds >= 0.9


async def test_wall_time_is_limited(sandbox: Sandbox) -> None:
    outcome = await sandbox.run(python("import time; time.sleep(1000)", limits=Limits(wall_seconds=0.5)))
    assert outcome.ended == "wall"
    assert outcome.wall_seconds >= 0.5


async def test_output_is_cut_at_the_cap_and_counted_beyond(sandbox: Sandbox) -> None:
    limits = Limits(output_bytes=10)
    exact = await sandbox.run(python("print('x' * 9)", limits=limits))
    assert (len(exact.stdout), exact.stdout_total) == (10, 10)
    over = await sandbox.run(python("print('x' * 10)", limits=limits)) if await sandbox.reset() else exact
    assert len(over.stdout) == 10
    assert over.stdout_total > 10


async def test_a_reset_leaves_no_file(sandbox: Sandbox) -> None:
    await sandbox.run(python("import os; os.makedirs('a/b'); open('a/b/c', 'w').write('x'); os.symlink('/', 'a/root')"))
    assert await sandbox.reset()
    outcome = await sandbox.run(python("import os; print(sorted(set(os.listdir()) - {'main.py', '.report'}))"))
    assert outcome.stdout == b"[]\n"


async def test_uses_are_counted(sandbox: Sandbox) -> None:
    for expected in (1, 2, 3):
        await sandbox.run(python("pass"))
        assert sandbox.uses == expected
        assert await sandbox.reset()


async def test_a_closed_sandbox_is_lost_not_silent(sandbox: Sandbox) -> None:
    assert sandbox.alive
    await sandbox.close()
    assert not sandbox.alive
    with pytest.raises(SandboxLost):
        await sandbox.run(python("print(1)"))
    assert not await sandbox.reset()
    await sandbox.close()


async def test_closing_ends_a_run(sandbox: Sandbox) -> None:
    run = asyncio.create_task(sandbox.run(python("import time; time.sleep(1000)", limits=Limits(wall_seconds=1000))))
    await asyncio.sleep(0.3)
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await run
