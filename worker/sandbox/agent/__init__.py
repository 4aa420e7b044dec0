"""What runs inside a sandbox, and how it gets there: the modules here are sent over the attached stream."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from worker.sandbox.agent.wire import HEAD

MODULES = ("wire", "kernel", "filter", "interpreter", "program", "watch", "reset", "keeper", "session", "main")
"""In the order of their imports."""

USUAL = (
    "bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator", "random", "re", "string",
    "typing",
)  # fmt: skip
"""What programs import most: the warm interpreter has it before they ask. `typing` alone takes longer than a fork; but
every page that these fill is copied, or at least mapped, for every program, so it is only a few."""

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
"""The container's whole command line: it reads the agent from standard input and becomes it."""


@lru_cache(maxsize=1)
def sources() -> bytes:
    """The agent's modules, in order."""
    here = Path(__file__).parent
    return json.dumps([(name, (here / f"{name}.py").read_text()) for name in MODULES]).encode()


def version() -> str:
    """Changes with every change of the agent."""
    return hashlib.sha256(sources()).hexdigest()[:16]


def first_frame(config: dict[str, object]) -> bytes:
    """What a new container is sent: its configuration, and the agent."""
    cold = (Path(__file__).parent / "interpreter.py").read_text()
    text = json.dumps(config | {"version": version(), "cold": cold}).encode()
    return HEAD.pack(len(text), len(sources())) + text + sources()
