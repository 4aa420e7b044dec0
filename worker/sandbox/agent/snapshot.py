"""A snapshot of what a check relies on, as it was before the program: builtins, modules, classes and functions.

The snapshot is taken before the program's first line, and interpreter.py puts everything back before the check's. This
module imports nothing of ours: a cold interpreter is given this source and that one as parts of one text.
"""

import builtins
import importlib
import opcode
import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FREE = ("print", "input", "open", "help", "exit", "quit", "copyright", "credits", "license")
"""Builtins that a check may well replace, and that decide nothing."""
NAMES = frozenset(name for name in dir(builtins) if name not in FREE and not name.startswith("__")) | {"__import__"}
MAKERS = frozenset(("globals", "locals", "vars", "exec"))
"""Builtins by which a check may define globals whose names cannot be seen in its code."""
STORE_NAME, STORE_GLOBAL, EXTENDED_ARG = map(opcode.opmap.get, ("STORE_NAME", "STORE_GLOBAL", "EXTENDED_ARG"))
OPERATORS = frozenset(
    name for kind in (object, type, int, str, dict, set) for name in vars(kind) if name.startswith("__")
) - {"__doc__", "__annotations__", "__module__", "__dict__", "__slotnames__"}
"""Methods that Python itself calls: a class that the check names must not get one."""
FIXED, HEAP = 1 << 8, 1 << 9
"""Flags of a class: it cannot be changed, and it was made at run time."""
LOOKUPS = ("__getattr__", "__dir__")
"""Functions of a module that answer for names which it lacks, and that decide nothing. In numpy, they use builtins; and
programs add attributes with the names of builtins to numpy, such as `np.str`, which old versions had."""
WRAPPERS = 4
"""How many wrapped functions are looked into, one within the other."""
Tools = tuple[tuple["Any", ...], ...]
"""What a check relies on, as it was, in six columns: (namespace, how to write there, name, value) of each thing; the
functions with what they are made of; the modules; the classes; the cells of closures with what they hold; and the
globals of functions, with the names of builtins that these use and that must not be among them."""


def tools_of(names: "list[str] | tuple[str, ...]") -> "Tools":
    """Return what a check relies on: builtins, and the modules, classes and functions that it names."""
    if not names:
        return BUILTINS
    things: dict[int, tuple[str, Any]] = {}
    own = {name.partition(".")[0] for name in os.listdir()}  # the program's own files are not tools
    for path in names:
        thing, parts = None, path.split(".")
        try:
            for end, part in enumerate(() if parts[0] in own else parts, 1):
                if thing is not None and hasattr(thing, part):
                    thing = getattr(thing, part)
                else:
                    thing = importlib.import_module(".".join(parts[:end]))
                for each in thing.__mro__ if isinstance(thing, type) else (thing,):
                    things.setdefault(id(each), (".".join(parts[:end]), each))
        except Exception:
            continue  # the check will fail at its import and say so
    known = (BUILTINS, IMPORTS, *(KNOWN.get(key) or _snapshot(*each) for key, each in things.items()))
    kept, texts, modules, classes, cells, _ = (sum((each[column] for each in known), ()) for column in range(6))
    spaces: dict[int, tuple[Any, set[str]]] = {}
    for *_, found in known:
        for holder, absent in found:
            spaces.setdefault(id(holder), (holder, set()))[1].update(absent)
    unique = {id(each[0]): each for each in texts}
    absences = tuple((holder, frozenset(absent)) for holder, absent in spaces.values())
    return kept, tuple(unique.values()), modules, classes, cells, absences


def remember(path: str, module: types.ModuleType) -> None:
    """Take a snapshot of a module and its classes once, for all programs: this copies the pages that it touches."""
    for each in (module, *(value for value in vars(module).values() if isinstance(value, type))):
        if getattr(each, "__module__", path) == path:
            KNOWN[id(each)] = _snapshot(path, each)


def _snapshot(path: str, thing: "Any") -> "Tools":
    """Return a module, a class or a function as it is now; nothing of anything else. A module's snapshot has everything
    callable in it, but looks only into the module's own functions."""
    kept: list[Any] = []
    if isinstance(thing, type):
        if thing.__flags__ & FIXED or not thing.__flags__ & HEAP:
            return NO_TOOLS
        holder: Any = vars(thing)
        put, remove = (method.__get__(thing) for method in (type.__setattr__, type.__delattr__))
        absent = (OPERATORS | _inherited(thing)).difference(holder)
        kept = [(holder, put, name, value) for name, value in holder.items() if hasattr(type(value), "__get__")]
        more, texts, cells, spaces = _made_of([value for *_, value in kept])
        row = (thing, type(thing), thing.__mro__, holder, absent, remove)
        return (*kept, *more), texts, (), (row,), cells, spaces
    if isinstance(thing, types.ModuleType):
        holder, module, function = vars(thing), types.ModuleType, types.FunctionType
        put = holder.__setitem__
        for name, value in holder.items():
            if (callable(value) or type(value) is module) and name not in FREE:
                kept.append((holder, put, name, value))
        more, texts, cells, spaces = _made_of(
            [value for *_, value in kept if type(value) is function and value.__globals__ is holder]
        )
        places = {name for name in (path, thing.__name__) if sys.modules.get(name) is thing}
        rows = tuple((name, thing, type(thing)) for name in places)
        return (*kept, *more), texts, rows, (), cells, (*spaces, (holder, ()))
    more, texts, cells, spaces = _made_of([thing])
    return more, texts, (), (), cells, spaces


def _inherited(thing: type) -> set[str]:
    """Return the methods of a class's bases, which a method of its own would hide, except those that are operators."""
    return {
        name
        for base in thing.__mro__[1:]
        for name, value in vars(base).items()
        if not name.startswith("__") and hasattr(type(value), "__get__")
    }


class _Parts:
    """What functions are made of: columns of the tools that are being filled."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.texts: dict[int, Any] = {}
        self.cells: list[Any] = []
        self.spaces: dict[int, tuple[Any, set[str]]] = {}

    def add(self, value: "Any") -> "list[Any]":
        """Take a function as it is now; return what it calls through its closure."""
        words = value.__kwdefaults__ and dict(value.__kwdefaults__)
        pairs = tuple(words.items()) if words else ()
        self.texts[id(value)] = (value, value.__code__, value.__defaults__, words, pairs)
        holder = value.__globals__
        if id(holder) not in self.spaces:
            self.spaces[id(holder)] = (holder, set())
            if "__builtins__" in holder:
                self.kept.append((holder, holder.__setitem__, "__builtins__", holder["__builtins__"]))
        if value.__qualname__ not in LOOKUPS:
            self.spaces[id(holder)][1].update(_builtins_of(value.__code__).difference(holder))
        inner: list[Any] = []
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # nothing is in it yet
            if callable(content):  # data may change
                self.cells.append((cell, content))
                inner.append(content)
        return inner

    def unwrap(self, value: "Any") -> "list[Any]":
        """Return the functions that a property, a method or another wrapper holds, or None in their places."""
        if isinstance(value, property):
            return [value.fget, value.fset, value.fdel]
        if isinstance(value, type):
            return []
        inner = [getattr(value, "__wrapped__", None), getattr(value, "__func__", None)]
        own = getattr(value, "__dict__", None)
        if type(own) is dict and type(own.get("func")) is types.FunctionType:  # of a cached property
            self.kept.append((own, own.__setitem__, "func", own["func"]))
            inner.append(own["func"])
        return inner


def _made_of(values: "list[Any]") -> "tuple[tuple[Any, ...], ...]":
    """Return what functions are made of, and those that they wrap, call through their closures, or get values by; as
    columns of the tools: things, functions, cells, globals."""
    parts = _Parts()
    for _ in range(WRAPPERS):
        inner: list[Any] = []
        for value in values:
            if type(value) is types.FunctionType and id(value) not in parts.texts:
                inner += parts.add(value)
            inner += parts.unwrap(value)
        values = [value for value in inner if value is not None]
        if not values:
            break
    return tuple(parts.kept), tuple(parts.texts.values()), tuple(parts.cells), tuple(parts.spaces.values())


def _builtins_of(code: types.CodeType) -> "frozenset[str]":
    """Return the builtins that a function uses, and the functions in it. Attributes of the same names count, too."""
    found = NAMES.intersection(code.co_names)
    for each in code.co_consts:
        if type(each) is types.CodeType:
            found |= _builtins_of(each)
    return found


def globals_of(code: types.CodeType, top: bool) -> "tuple[list[str], list[str]]":
    """Return the globals that a text binds: those that its functions declare as global and, if `top`, those at its top
    level; and all names that it uses, of globals and attributes."""
    bound: list[str] = []
    used: list[str] = []
    pending = [code]
    for each in pending:
        high, text = 0, each.co_code
        for operation, low in zip(text[::2], text[1::2]):  # noqa: B905 - they are of equal length
            if operation == STORE_GLOBAL or (operation == STORE_NAME and top and each is code):
                bound += (each.co_names[high + low],)
            high = (high + low) << 8 if operation == EXTENDED_ARG else 0
        used += each.co_names
        for inner in each.co_consts:
            if type(inner) is type(code):
                pending += (inner,)
    return bound, used


KNOWN: "dict[int, Tools]" = {}
"""Snapshots that were taken before the first program, by the identity of the thing."""
NO_TOOLS: "Tools" = ((), (), (), (), (), ())
BUILTINS = _snapshot("builtins", builtins)
FROM = ("_handle_fromlist", importlib._bootstrap._handle_fromlist)  # type: ignore[attr-defined]
"""The function that `from package import` calls."""
IMPORTS = ((vars(importlib._bootstrap), vars(importlib._bootstrap).__setitem__, *FROM),), *_snapshot("", FROM[1])[1:]
