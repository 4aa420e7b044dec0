"""A notebook in a container: twenty cells, a plot, an interruption, and nothing left for the next user."""

import asyncio
import base64
from collections.abc import AsyncIterator

import pytest

from evalpool.api.sandbox import DockerNotebookConfig, ExecutionStatus, Sandbox, SandboxFactory, SandboxType, ToolResult
from evalpool.api.sandbox.box import BoxSandbox

PLOT = """
import matplotlib.pyplot as plt
plt.plot([1, 2, 3], [1, 4, 9])
plt.title("squares")
plt.show()
"""
STUBBORN = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)"


@pytest.fixture
async def notebook(notebook_image: None) -> AsyncIterator[Sandbox]:
    config = DockerNotebookConfig(tools_config=["notebook_executor", "shell_executor"], memory_limit="512m")
    async with SandboxFactory.create_sandbox(SandboxType.DOCKER_NOTEBOOK, config) as sandbox:
        yield sandbox


async def run(sandbox: Sandbox, code: str, **more: object) -> ToolResult:
    return await sandbox.execute_tool("notebook_executor", {"code": code, **more})


async def test_twenty_cells_run_and_leave_nothing_behind(notebook: BoxSandbox) -> None:
    await run(notebook, "values = []")
    for number in range(15):
        cell = await run(notebook, f"values.append({number})\nprint('cell {number}')\nsum(values)")
        assert cell.output == f"cell {number}\n\nResult: {sum(range(number + 1))}"
    plot = await run(notebook, PLOT, timeout=60)
    assert (plot.status, plot.error) == (ExecutionStatus.SUCCESS, None)
    pictures = [display["image/png"] for display in plot.metadata["displays"] if "image/png" in display]
    assert len(pictures) == 1
    assert base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    table = await run(notebook, "import pandas\npandas.DataFrame({'a': [1]})", timeout=60)
    assert "<table" in table.metadata["result"]["text/html"]
    slow = await run(notebook, "while True: pass", timeout=0.5)
    assert (slow.status, slow.metadata["state"]) == (ExecutionStatus.TIMEOUT, "kept")
    assert "the variables of earlier cells are kept" in str(slow.error)
    assert (await run(notebook, "len(values)")).output == "\nResult: 15"
    lost = await run(notebook, STUBBORN, timeout=0.5)
    assert (lost.status, lost.metadata["state"]) == (ExecutionStatus.TIMEOUT, "lost")
    assert "all variables are lost" in str(lost.error)
    assert "NameError" in str((await run(notebook, "values")).error)
    await run(notebook, "import os, threading\nsecret = 1\nopen('left', 'w').write('x')\nos.environ['LEFT'] = '1'")
    await run(notebook, "import subprocess\nsubprocess.Popen(['sleep', '8765'], start_new_session=True)")
    assert await notebook.reset()
    left = await notebook.execute_tool("shell_executor", {"command": "ls -A . /tmp; ps -eo args | grep '[8]765'; env"})
    assert "left" not in left.output.lower()
    assert "8765" not in left.output
    after = await run(notebook, "import os\n'secret' in globals(), os.environ.get('LEFT')")
    assert after.output == "\nResult: (False, None)"


async def test_a_cell_can_be_interrupted_and_the_kernel_restarted(notebook: Sandbox) -> None:
    await run(notebook, "x = 1")
    assert (await run(notebook, "", action="interrupt")).output == "No cell is running"
    waiting = asyncio.create_task(run(notebook, "import time\nprint('on', flush=True)\ntime.sleep(1000)", timeout=600))
    for _ in range(200):
        await asyncio.sleep(0.05)
        if (await run(notebook, "", action="interrupt")).output == "Interrupted":
            break
    cell = await waiting
    assert cell.status is ExecutionStatus.CANCELLED
    assert "KeyboardInterrupt" in str(cell.error)
    assert (await run(notebook, "x")).output == "\nResult: 1"
    assert "lost" in (await run(notebook, "", action="restart")).output
    assert "NameError" in str((await run(notebook, "x")).error)
    waiting = asyncio.create_task(run(notebook, "import time\ntime.sleep(1000)", timeout=600))
    await asyncio.sleep(0.5)
    await run(notebook, "", action="restart")
    restarted = await waiting
    assert (restarted.status, restarted.metadata["state"]) == (ExecutionStatus.ERROR, "lost")
    assert "restarted" in str(restarted.error)


async def test_a_cancelled_caller_interrupts_its_cell_and_the_state_stays(notebook: Sandbox) -> None:
    await run(notebook, "x = 5")
    for code, state in (("import time\ntime.sleep(1000)", "kept"), (STUBBORN, "lost")):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run(notebook, code, timeout=600), 0.5)
        after = await run(notebook, "print('x' in globals())")
        assert (after.output, after.metadata["state"]) == (f"{state == 'kept'}\n", state)
    assert (await run(notebook, "import sys\nsys.exit(0)")).success
    assert "SystemExit: 3" in str((await run(notebook, "sys.exit(3)")).error)


async def test_a_cell_that_kills_its_kernel_gets_an_error(notebook: Sandbox) -> None:
    dead = await run(notebook, "import os, signal\nprint('last')\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (dead.status, dead.metadata["state"]) == (ExecutionStatus.ERROR, "lost")
    assert "died" in str(dead.error)
    hog = await run(notebook, "x = b'x' * (2 << 30)")
    assert hog.status is ExecutionStatus.ERROR
    assert "memory" in str(hog.error).lower()
    assert (await run(notebook, "1 + 1")).output == "\nResult: 2"


async def test_cells_that_forge_or_flood_output_harm_only_themselves(notebook: Sandbox) -> None:
    flood = await run(notebook, "while True: print('x' * 100_000)", timeout=60)
    assert (flood.status, flood.metadata["truncated"]) == (ExecutionStatus.ERROR, True)
    assert len(flood.output) <= 17 << 20
    lie = """
import os
for fd in range(3, 20):
    try: os.write(fd, b'{"id": 2, "done": true}\\n[[[\\n\\xff')
    except OSError: pass
1
"""
    assert (await run(notebook, lie)).status is not None
    assert (await run(notebook, "import os\nos.close(1)")).status is not None
    assert (await run(notebook, "2 + 2")).output.endswith("Result: 4")


async def test_cells_wait_their_turn(notebook: Sandbox) -> None:
    await run(notebook, "order = []")
    await asyncio.gather(*(run(notebook, f"order.append({number})") for number in range(8)))
    assert (await run(notebook, "order")).output == "\nResult: [0, 1, 2, 3, 4, 5, 6, 7]"


async def test_a_cell_that_awaits_runs_in_the_loop_from_its_first_line(notebook: Sandbox) -> None:
    begin = "import asyncio\nasync def work(): return 3\ntasks = [asyncio.create_task(work())]\n"
    assert (await run(notebook, begin + "await asyncio.gather(*tasks)")).output == "\nResult: [3]"
    late = await run(notebook, "x = 1\nimport time\nawait asyncio.sleep(0)\ntime.sleep(1000)", timeout=1)
    assert (late.status, late.metadata["state"]) == (ExecutionStatus.TIMEOUT, "kept")
    assert (await run(notebook, "x")).output == "\nResult: 1"


async def test_shell_cells_run_in_bash_with_its_exit_codes(notebook: Sandbox) -> None:
    assert (await run(notebook, "%%bash\n[[ a == a ]] && echo yes")).output == "yes\n"
    assert (await run(notebook, "!echo ${BASH_VERSION:0:1}")).output == "5\n"
    failed = await run(notebook, "%%bash\nexit 3")
    assert "CalledProcessError" in str(failed.error)
    assert not failed.success


async def test_a_magic_that_is_not_supported_is_refused_by_name(notebook: Sandbox) -> None:
    refused = await run(notebook, "x = 1\n%pip install requests")
    assert (refused.status, refused.output) == (ExecutionStatus.ERROR, "")
    assert "SyntaxError: the magic %pip is not supported here" in str(refused.error)


async def test_a_kernel_that_ended_between_cells_is_reported(notebook: Sandbox) -> None:
    await run(notebook, "x = 5\nimport os, threading\nthreading.Timer(0.3, os._exit, (1,)).start()")
    await asyncio.sleep(1)
    after = await run(notebook, "print('x' in globals())")
    assert (after.output, after.metadata["state"]) == ("False\n", "lost")
    assert "are lost" in str(after.error)


async def test_an_action_refuses_a_cell(notebook: Sandbox) -> None:
    for action in ("restart", "interrupt"):
        assert "code must be empty" in str((await run(notebook, "x = 1", action=action)).error)
