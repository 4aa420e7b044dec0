"""What every sandbox promises, whatever it is made of."""

import asyncio

import pytest

from evalpool.schemas import Limits, SandboxLost
from evalpool.worker.sandbox.base import SIDE, STDERR, STDOUT, Box, Command, Outcome, Program


def python(code: str, **more: object) -> Program:
    return Program(code=code.encode(), main="main.py", **more)  # type: ignore[arg-type]


def bash(code: str, **more: object) -> Program:
    return Program(code=code.encode(), main="main.sh", argv=("bash", "main.sh"), **more)  # type: ignore[arg-type]


async def test_a_program_reads_and_writes(sandbox: Box) -> None:
    outcome = await sandbox.run(python("import sys; print(input()); print('no', file=sys.stderr)", stdin=b"hi\n"))
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("itself", 0, None)
    assert (outcome.stdout, outcome.stderr) == (b"hi\n", b"no\n")
    assert (outcome.stdout_total, outcome.stderr_total) == (3, 3)


async def test_a_program_gets_its_arguments_environment_and_files(sandbox: Box) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['A'], open('d/x').read())"
    outcome = await sandbox.run(python(code, args=("1", "b c"), env={"A": "ü"}, files={"d/x": b"data"}))
    assert outcome.stdout.decode() == "['1', 'b c'] ü data\n"


async def test_a_shell_script_runs(sandbox: Box) -> None:
    outcome = await sandbox.run(bash('read x; echo "$1 $x"; exit 3', args=("a",), stdin=b"b\n"))
    assert (outcome.stdout, outcome.exit_code) == (b"a b\n", 3)


@pytest.mark.parametrize(
    ("code", "exit_code", "signal", "note"),
    [
        ("raise SystemExit(5)", 5, None, ""),
        ("1/0", 1, None, "raised"),
        ("x =", 1, None, "syntax"),
        ("raise MemoryError", 1, None, "memory"),
        ("import os; os.kill(os.getpid(), 11)", None, 11, ""),
        ("import os; os._exit(0)", 0, None, ""),
    ],
)
async def test_the_outcome_says_how_a_program_ended(
    sandbox: Box, code: str, exit_code: int | None, signal: int | None, note: str
) -> None:
    outcome = await sandbox.run(python(code))
    assert (outcome.exit_code, outcome.signal, outcome.note) == (exit_code, signal, note)


@pytest.mark.parametrize(
    ("code", "checked", "note"),
    [
        ("def f(): return 1", True, ""),
        ("def f(): return 2", False, "assertion"),
        ("def f(): return 1/0", False, "raised"),
        ("def f(): raise SystemExit(0)", False, ""),
        ("import sys; sys.exit(0)", False, ""),
        ("import os; os._exit(0)", False, ""),
    ],
)
async def test_a_check_counts_only_if_it_ran_to_its_end(sandbox: Box, code: str, checked: bool, note: str) -> None:
    outcome = await sandbox.run(python(code, check=b"assert f() == 1"))
    assert (outcome.checked, outcome.note) == (checked, note)


async def test_cpu_time_is_limited(sandbox: Box) -> None:
    outcome = await sandbox.run(python("while True: pass", limits=Limits(cpu_seconds=1, wall_seconds=60)))
    assert outcome.ended == "cpu"
    assert outcome.cpu_seconds >= 0.9


async def test_wall_time_is_limited(sandbox: Box) -> None:
    outcome = await sandbox.run(python("import time; time.sleep(1000)", limits=Limits(wall_seconds=0.5)))
    assert outcome.ended == "wall"
    assert outcome.wall_seconds >= 0.5


async def test_output_is_cut_at_the_limit_and_counted_beyond_it(sandbox: Box) -> None:
    limits = Limits(output_bytes=10)
    exact = await sandbox.run(python("print('x' * 9)", limits=limits))
    assert (len(exact.stdout), exact.stdout_total) == (10, 10)
    over = await sandbox.run(python("print('x' * 10)", limits=limits)) if await sandbox.reset() else exact
    assert len(over.stdout) == 10
    assert over.stdout_total > 10


async def test_a_reset_leaves_no_file(sandbox: Box) -> None:
    await sandbox.run(python("import os; os.makedirs('a/b'); open('a/b/c', 'w').write('x'); os.symlink('/', 'a/root')"))
    assert await sandbox.reset()
    outcome = await sandbox.run(python("import os; print(sorted(set(os.listdir()) - {'main.py', '.report'}))"))
    assert outcome.stdout == b"[]\n"


async def test_uses_are_counted(sandbox: Box) -> None:
    for expected in (1, 2, 3):
        await sandbox.run(python("pass"))
        assert sandbox.uses == expected
        assert await sandbox.reset()


async def test_a_run_in_a_closed_sandbox_raises_sandbox_lost(sandbox: Box) -> None:
    assert sandbox.alive
    await sandbox.close()
    assert not sandbox.alive
    with pytest.raises(SandboxLost):
        await sandbox.run(python("print(1)"))
    assert not await sandbox.reset()
    await sandbox.close()


async def test_closing_a_sandbox_ends_its_run(sandbox: Box) -> None:
    run = asyncio.create_task(sandbox.run(python("import time; time.sleep(1000)", limits=Limits(wall_seconds=1000))))
    await asyncio.sleep(0.3)
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await run


async def do(sandbox: Box, command: Command, given: bytes = b"") -> tuple[Outcome, dict[int, bytes]]:
    """Run a command of a session to its end; return its outcome and what it wrote to each stream."""
    said = {STDOUT: b"", STDERR: b"", SIDE: b""}

    def hear(stream: int, data: bytes) -> None:
        said[stream] += data

    running = sandbox.spawn(command, hear)
    running.feed(given, last=True)
    return await running.over, said


async def test_a_session_runs_commands_and_keeps_files(sandbox: Box) -> None:
    outcome, said = await do(sandbox, Command(argv=("sh", "-c", "cat > x; echo out; echo err >&2; exit 3")), b"given")
    assert (outcome.ended, outcome.exit_code) == ("itself", 3)
    assert (said[STDOUT], said[STDERR]) == (b"out\n", b"err\n")
    outcome, said = await do(sandbox, Command(argv=("cat", "x")))
    assert said[STDOUT] == b"given"
    code = b"import os, sys; print(open('x').read(), sys.argv[1:], sorted(os.listdir()))"
    _, said = await do(sandbox, Command(code=code, args=("a",), files={"d/y": b""}))
    assert said[STDOUT].startswith(b"given ['a'] [")
    assert b"'d', 'x']" in said[STDOUT]
    _, said = await do(sandbox, Command(argv=("ls",), cwd="new/folder", files={"z/a": b"", "b": b""}))
    assert said[STDOUT] == b"b\nz\n"
    _, said = await do(sandbox, Command(argv=("ls",), cwd="d"))
    assert said[STDOUT] == b"y\n"
    assert await sandbox.reset()
    _, said = await do(sandbox, Command(argv=("ls", "-A")))
    assert said[STDOUT] == b""


async def test_commands_run_side_by_side(sandbox: Box) -> None:
    meet = "touch $0; until [ -e $1 ]; do sleep 0.01; done; echo met"
    pairs = [("a", "b"), ("b", "c"), ("c", "a")]
    ends = await asyncio.gather(*(do(sandbox, Command(argv=("sh", "-c", meet, *pair))) for pair in pairs))
    assert [said[STDOUT] for _, said in ends] == [b"met\n"] * 3


async def test_output_is_heard_while_a_command_runs_and_input_can_wait(sandbox: Box) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    running = sandbox.spawn(Command(argv=("cat",)), lambda _, data: heard.put_nowait(data))
    for word in (b"one\n", b"two\n"):
        running.feed(word)
        assert await asyncio.wait_for(heard.get(), 30) == word
    running.feed(b"", last=True)
    assert (await running.over).exit_code == 0


async def test_processes_of_a_command_end_with_the_command(sandbox: Box) -> None:
    alive = Command(argv=("sh", "-c", "ps -eo args 2>/dev/null | grep -c '[s]leep 54321'"))
    started = await do(sandbox, Command(argv=("sh", "-c", "sleep 54321 & sleep 54321 > /dev/null & echo on")))
    assert started[1][STDOUT] == b"on\n"
    timed = await do(sandbox, Command(argv=("sh", "-c", "sleep 54321 & sleep 54321"), wall_seconds=0.5))
    assert timed[0].ended == "wall"
    assert (await do(sandbox, alive))[1][STDOUT] == b"0\n"


async def test_a_command_can_be_interrupted_and_stopped(sandbox: Box) -> None:
    heard = asyncio.Event()
    # Short sleeps, because Python misses a signal that comes in the moment between its last look for one and a sleep.
    code = b"""
import time
try:
    print('ready', flush=True)
    while True: time.sleep(0.01)
except KeyboardInterrupt: raise SystemExit(7)
"""
    for end in ("interrupt", "stop"):
        heard.clear()
        running = sandbox.spawn(Command(code=code, wall_seconds=1000), lambda *_: heard.set())
        await asyncio.wait_for(heard.wait(), 30)
        getattr(running, end)()
        outcome = await asyncio.wait_for(running.over, 30)
        assert (outcome.ended, outcome.exit_code) == (("itself", 7) if end == "interrupt" else ("stopped", None))
    running = sandbox.spawn(Command(argv=("sleep", "1000"), wall_seconds=1000), print)
    running.stop()
    assert (await asyncio.wait_for(running.over, 30)).ended == "stopped"


async def test_a_command_is_stopped_when_it_writes_too_much(sandbox: Box) -> None:
    outcome, said = await do(sandbox, Command(argv=("yes",), output_bytes=100_000))
    assert outcome.ended == "output"
    assert 100_000 < len(said[STDOUT]) < 200_000


async def test_a_command_may_have_a_channel_beside_its_output(sandbox: Box) -> None:
    code = "import os; os.write(3, b'aside'); print('out')"
    _, said = await do(sandbox, Command(argv=("python3", "-c", code), side=True))
    assert (said[SIDE], said[STDOUT]) == (b"aside", b"out\n")


async def test_a_missing_command_is_reported_as_by_a_shell(sandbox: Box) -> None:
    outcome, said = await do(sandbox, Command(argv=("no-such-program",)))
    assert outcome.exit_code != 0
    assert b"o such file" in said[STDERR]


async def test_the_usage_of_a_sandbox_is_seen_while_a_command_runs(sandbox: Box) -> None:
    heard = asyncio.Event()
    code = b"data = b'x' * (40 << 20); print(1, flush=True); input()"
    running = sandbox.spawn(Command(code=code), lambda *_: heard.set())
    await asyncio.wait_for(heard.wait(), 30)
    usage = sandbox.usage()
    assert usage is not None
    assert usage.memory_bytes > 40 << 20
    assert usage.processes >= 1
    running.feed(b"\n", last=True)
    await running.over


async def test_a_reset_ends_a_session_and_its_running_commands(sandbox: Box) -> None:
    running = sandbox.spawn(Command(argv=("sleep", "1000"), wall_seconds=1000), print)
    assert await sandbox.reset()
    assert (await running.over).ended == "stopped"
    assert (await sandbox.run(python("print(1)"))).stdout == b"1\n"


async def test_closing_a_sandbox_ends_its_session(sandbox: Box) -> None:
    running = sandbox.spawn(Command(argv=("sleep", "1000"), wall_seconds=1000), print)
    await asyncio.sleep(0.2)
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await running.over
    with pytest.raises(SandboxLost):
        sandbox.spawn(Command(argv=("true",)), print)
