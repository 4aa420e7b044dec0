"""Doors: second names for packages, which lead to the same modules and not to copies of them.

The folders `api/`, `worker/` and `schemas/` are parts of the package `evalpool`. In a checkout they can also be
imported by their own names. Without this module, Python would then load every file a second time, and a class of one
copy would not be the class of the other. `evalpool.sandbox` is such a name everywhere; its folder has only what type
checkers and editors need, since they do not see through the door.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False  # `import evalpool` imports this module, and must be quick
if TYPE_CHECKING:
    from importlib.abc import InspectLoader
    from types import CodeType, ModuleType

DOORS = {
    "api": "evalpool.api",
    "worker": "evalpool.worker",
    "schemas": "evalpool.schemas",
    "evalpool.sandbox": "evalpool.api.sandbox",
}
"""Second name → the package that it stands for."""
_open = {"evalpool.sandbox"}
"""The doors that lead to our packages. Another project's package called `api` is left alone."""


class _Door:
    """Finds and loads `api.jobs` as `evalpool.api.jobs`."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}  # real name → the module's own spec

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        real = _real(name)
        spec = None if real is None else _spec(real)
        return None if spec is None else ModuleSpec(name, self, origin=spec.origin)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> "ModuleType":
        real = _expect(spec.name)
        module = import_module(real)
        # Two threads may come to the same module through two doors: only the first one sees the module's own spec.
        self._specs.setdefault(real, module.__spec__)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        """Put back the module's own spec, which Python has just replaced by the door's. Its code has run already."""
        module.__spec__ = self._specs[module.__name__]

    def get_code(self, fullname: str) -> "CodeType | None":
        """Return the code of a module for `python -m api.cli`, which runs the module instead of importing it."""
        real = _expect(fullname)
        loader = _loader(real)
        return None if loader is None else loader.get_code(real)

    def get_source(self, fullname: str) -> str | None:
        """Return the source of a module, for tracebacks."""
        real = _expect(fullname)
        loader = _loader(real)
        return None if loader is None else loader.get_source(real)


def install() -> None:
    """Let Python find modules through the doors. `import evalpool` calls this once."""
    sys.meta_path.insert(0, _Door())


def open_door(name: str) -> None:
    """Replace the package `name`, which is being imported under this second name, by the package it stands for."""
    _open.add(name)
    sys.modules[name] = import_module(DOORS[name])


def _real(name: str) -> str | None:
    """Return the real name of a module that is imported through an open door, otherwise `None`."""
    for door in _open:
        if name == door or name.startswith(f"{door}."):
            return DOORS[door] + name.removeprefix(door)
    return None


def _expect(name: str) -> str:
    real = _real(name)
    if real is None:
        raise ImportError(f"{name} is not a module of evalpool", name=name)
    return real


def _spec(name: str) -> ModuleSpec | None:
    from importlib.util import find_spec

    return find_spec(name)


def _loader(name: str) -> "InspectLoader | None":
    from importlib.abc import InspectLoader

    spec = _spec(name)
    return spec.loader if spec and isinstance(spec.loader, InspectLoader) else None
