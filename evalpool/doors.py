"""Doors: second names for packages, which lead to the same modules and not to copies of them.

The folders `api/`, `worker/` and `schemas/` are parts of the package `evalpool`, which has links to them. In a checkout
they can also be imported by their own names. Without this module, Python would then load every file a second time, and
a class of one copy would not be the class of the other. `evalpool.sandbox` is such a name everywhere.
"""

import sys
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import CodeType, ModuleType
from typing import Any

DOORS = {
    "api": "evalpool.api",
    "worker": "evalpool.worker",
    "schemas": "evalpool.schemas",
    "evalpool.sandbox": "evalpool.api.sandbox",
}
"""Second name → the package that it stands for."""


class _Door(MetaPathFinder, InspectLoader):
    """Imports `api.jobs` as `evalpool.api.jobs`. Another project's package called `api` is left alone."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        real = _real(name)
        spec = None if real is None else find_spec(real)
        return None if spec is None else spec_from_loader(name, self, origin=spec.origin)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_expect(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Put back the module's own spec, which Python has just replaced by the door's. Its code has run already."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a module for `python -m api.cli`, which runs the module instead of importing it."""
        real = _expect(fullname)
        loader = _loader(real)
        return None if loader is None else loader.get_code(real)

    def get_source(self, fullname: str) -> str | None:
        """Return the source of a module, for tracebacks."""
        real = _expect(fullname)
        loader = _loader(real)
        return None if loader is None else loader.get_source(real)


def open_door(name: str) -> None:
    """Replace the package `name`, which is being imported under this second name, by the package it stands for."""
    if not any(isinstance(finder, _Door) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Door())
    sys.modules[name] = import_module(DOORS[name])


def _real(name: str) -> str | None:
    """Return the real name of a module that is imported through an open door, otherwise `None`."""
    for door, package in DOORS.items():
        if name.startswith(f"{door}.") and sys.modules.get(door) is sys.modules.get(package):
            return package + name.removeprefix(door)
    return None


def _expect(name: str) -> str:
    real = _real(name)
    if real is None:
        raise ImportError(f"{name} is not a module of evalpool", name=name)
    return real


def _loader(name: str) -> InspectLoader | None:
    spec = find_spec(name)
    return spec.loader if spec and isinstance(spec.loader, InspectLoader) else None
