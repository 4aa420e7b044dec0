"""Modules that the warm interpreter imports in advance."""

import io
import logging
from collections.abc import Iterator
from dataclasses import replace

import docker
import pytest

from evalpool.schemas import Limits, SandboxLost
from evalpool.schemas.settings import Settings
from evalpool.worker.sandbox.base import Outcome, Program, Shape
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.sandbox.engine import Engine
from evalpool.worker.sandbox.factory import Containers
from tests.conftest import PATIENCE
from tests.sandbox.conftest import SHAPE


def python(code: str) -> Program:
    return Program(code=code.encode(), main="main.py")


async def test_modules_that_an_image_lacks_are_not_imported_there_in_advance(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = ("nowhere", "numpy", "asyncio.windows_events", "decimal")
    containers = Containers(engine, Settings(preload=wanted))
    code = f"import sys; print([name for name in {wanted!r} if name in sys.modules])"
    with caplog.at_level(logging.WARNING, "evalpool.sandbox"):
        for _ in range(2):
            box = await containers.start(replace(SHAPE, memory_mib=256))
            try:
                outcome = await box.run(python(code))
            finally:
                await box.close()
            assert outcome.stdout == b"['numpy', 'decimal']\n", outcome.stderr
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "nowhere cannot be imported in the image evalpool/python",
        "asyncio.windows_events cannot be imported in the image evalpool/python",
    ]


NUMPY = replace(SHAPE, memory_mib=256, preload=("numpy",))
TELL = """\
import sys
import numpy as np
import os, signal, threading, warnings
print(np.__version__, np.arange(6).reshape(2, 3).sum(axis=0), np.linalg.inv([[2.0, 0], [0, 4]]).tolist())
print(sorted(os.environ.items()), sys.flags, threading.active_count(), len(os.listdir("/proc/self/task")))
print([signal.getsignal(n) for n in range(1, 32)], sorted(map(repr, warnings.filters)), np.geterr(), sys.path, sys.argv)
print(sorted(name for name in sys.modules if name.partition(".")[0] == "numpy"), "pandas" in sys.modules)
np.random.seed(7)
print(np.random.rand(), type(np.random.mtrand._rand).__name__)
"""
POISON = """\
import builtins, os, sys
import numpy as np
def evil(*args, **kwargs): return 666
for name in ("sum", "mean", "array", "arange"):
    setattr(np, name, evil)
np.core.multiarray.array = np.ndarray.__array_finalize__ = evil
sys.modules["numpy"] = evil
np.random.seed(1)
for path in ("/proc/1/mem", "/proc/self/../1/mem", f"/proc/{os.getppid()}/mem"):
    try:
        open(path, "r+b").write(b"x")
        print("written")
    except OSError as error:
        print(type(error).__name__)
try:
    os.kill(1, 9)
except OSError as error:
    print(type(error).__name__)
"""


async def outcomes(engine: Engine, shape: Shape, *programs: Program) -> list[Outcome]:
    box = await Containers(engine, Settings()).start(shape)
    try:
        seen = []
        for program in programs:
            seen.append(await box.run(program))
            assert await box.reset()
        return seen
    finally:
        await box.close()


async def test_a_program_finds_the_same_whether_its_import_was_made_in_advance_or_not(engine: Engine) -> None:
    tell = replace(python(TELL), check=b"import numpy as np\nassert np.sum([1, 2]) == 3", tools=("numpy", "numpy.sum"))
    changed = replace(tell, code=b"import numpy as np\nnp.sum = lambda *_: 3")
    warm = await outcomes(engine, NUMPY, tell, changed, tell, python("print('numpy' in __import__('sys').modules)"))
    plain = await outcomes(engine, replace(NUMPY, preload=()), tell, changed, tell)
    assert warm[3].stdout == b"True\n"
    for one, other in zip(warm, plain, strict=False):
        assert (one.stdout, one.stderr, one.exit_code, one.checked) == (
            other.stdout, other.stderr, other.exit_code, other.checked,
        )  # fmt: skip
        # What was imported in advance is counted, and some pages more that both sides of a fork have.
        assert 0.6 < one.memory_bytes / other.memory_bytes < 1.5


EAT = """import numpy, gc, sys
gc.unfreeze()
gc.collect()
numpy.random.rand(1000), numpy.linalg.inv(numpy.eye(50))
held = []
while True:
    held.append(bytearray(1 << 20))
    print(end=".", flush=True)
"""


async def test_a_program_has_as_much_memory_whether_its_import_was_made_in_advance_or_not(engine: Engine) -> None:
    eaten = []
    for shape in (NUMPY, replace(NUMPY, preload=())):
        box = await Containers(engine, Settings()).start(shape)
        try:
            outcome = await box.run(replace(python(EAT), limits=Limits(cpu_seconds=20, wall_seconds=PATIENCE)))
        finally:
            await box.close()
        assert outcome.oom_kills == 1
        eaten.append(outcome.stdout_total)
    warm, plain = eaten
    assert plain <= warm < plain + 16


async def test_a_program_that_poisons_an_import_changes_nothing_for_the_next(engine: Engine) -> None:
    first, _, last = await outcomes(engine, NUMPY, python(TELL), python(POISON), python(TELL))
    assert first.exit_code == 0, first.stderr
    assert last.stdout == first.stdout


async def test_one_sandbox_that_is_lost_at_its_start_says_nothing_about_its_imports(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, limit = [SandboxLost("a test has taken it away")], DockerBox.limit

    async def lose(box: DockerBox, shape: Shape) -> bool:
        if losses:
            raise losses.pop()
        return await limit(box, shape)

    monkeypatch.setattr(DockerBox, "limit", lose)
    containers = Containers(engine, Settings())
    for _ in range(2):
        box = await containers.start(NUMPY)
        try:
            outcome = await box.run(python("import sys; print('numpy' in sys.modules)"))
        finally:
            await box.close()
        assert outcome.stdout == b"True\n"


@pytest.fixture
def odd(engine_client: docker.DockerClient) -> Iterator[str]:
    """An image with modules that must not be imported in advance."""
    place = "/usr/lib/python3/dist-packages"
    modules = {
        "busy": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "deadly": "import os; os.getpid() == 1 and os._exit(3)",
        "untidy": 'import os; os.makedirs(os.path.expanduser("~/.config/untidy"), exist_ok=True)',
        "cramped": "import tempfile; held = tempfile.TemporaryFile(); held.write(bytes(9999)); held.flush()",
    }
    writing = (f"RUN echo '{code}' > {place}/{name}.py\n" for name, code in modules.items())
    text = "FROM evalpool/python:3.11\n" + "".join(writing)
    tag = "evalpool-tests/odd:1"
    engine_client.images.build(fileobj=io.BytesIO(text.encode()), tag=tag, rm=True, network_mode="none")
    yield tag
    engine_client.images.remove(tag, force=True)


async def test_a_module_that_does_more_than_define_something_is_left_to_the_programs(
    engine: Engine, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    shape = replace(NUMPY, image=odd)
    containers = Containers(engine, Settings())
    names = ("numpy", "busy", "untidy", "cramped", "deadly")
    code = f"import sys; print(*(name for name in {names} if name in sys.modules)); import {','.join(names)}"
    for preload, expected in {
        ("busy", "numpy"): b"numpy\n",
        ("untidy", "numpy"): b"numpy\n",
        ("cramped", "numpy"): b"numpy\n",
        ("deadly", "numpy"): b"\n",  # which of them it was is not known
    }.items():
        for _ in range(2):
            box = await containers.start(replace(shape, preload=preload))
            try:
                outcome = await box.run(python(code))
                assert await box.reset()
            finally:
                await box.close()
            assert (outcome.stdout, outcome.exit_code) == (expected, 0), outcome.stderr
    warned = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert warned == ["busy", "untidy", "cramped", "deadly,"]
    assert "it starts threads" in caplog.text
    assert caplog.text.count("it writes files") == 2
