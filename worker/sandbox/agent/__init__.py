"""The agent, which runs inside a sandbox, and how it gets there: its modules are sent over the attached stream."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from evalpool.worker.sandbox.agent.wire import HEAD, Config

MODULES = (
    "words", "wire", "kernel", "filter", "explanation", "snapshot", "interpreter", "program", "watch", "reset",
    "keeper", "session", "main",
)  # fmt: skip
"""The agent's modules, in the order of their imports."""
COLD = ("words", "explanation", "snapshot", "interpreter")
"""Those of them that a cold interpreter is given, as one text."""

USUAL = (
    "bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator", "random", "re", "string",
    "typing",
)  # fmt: skip
"""Modules that programs import most, which the warm interpreter has already. `typing` alone takes longer to import than
a fork; but every page that these modules fill is copied, or at least mapped, for every program, so there are few."""

BOOTSTRAP = """
import json, os, sys, types
def read(n):
    data = b""
    while len(data) < n:
        part = os.read(0, n - len(data))
        if not part: os._exit(0)
        data += part
    return data
size = int.from_bytes(read(4), "big"), int.from_bytes(read(4), "big")
config = json.loads(read(size[0]))
sources = json.loads(read(size[1]))
package = types.ModuleType("evalpool_agent")
package.__path__ = []
sys.modules["evalpool_agent"] = package
for name, source in sources:
    module = types.ModuleType("evalpool_agent." + name)
    module.__package__ = "evalpool_agent"
    sys.modules[module.__name__] = module
    exec(compile(source, "<agent " + name + ">", "exec"), vars(module))
    setattr(package, name, module)
package.main.main(config)
"""
"""The container's whole command: it reads the agent from standard input and becomes it."""


@lru_cache(maxsize=1)
def sources() -> bytes:
    """Return the agent's modules and their sources, in order, as JSON."""
    here = Path(__file__).parent
    return json.dumps([(name, (here / f"{name}.py").read_text()) for name in MODULES]).encode()


def version() -> str:
    """Return a name for this text of the agent, which is another after every change."""
    return hashlib.sha256(sources()).hexdigest()[:16]


def first_frame(uid: int, home: str, env: dict[str, str], preload: list[str], imports: list[str]) -> bytes:
    """Return what a new container is sent: its configuration, and the agent's modules."""
    cold = "".join((Path(__file__).parent / f"{name}.py").read_text() for name in COLD)
    config = Config(uid=uid, home=home, env=env, preload=preload, imports=imports, version=version(), cold=cold)
    text = json.dumps(config).encode()
    return HEAD.pack(len(text), len(sources())) + text + sources()
