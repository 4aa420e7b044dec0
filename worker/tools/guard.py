"""Finds what a check relies on, so that no program can replace it (see `agent/interpreter.py`)."""

import ast
import re
import warnings
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

SHORT, HEAD = 1 << 14, 1 << 18
"""A check of up to `SHORT` characters is parsed, and the result is cached, since the samples of a problem have the same
check. In a longer check, only lines that begin with an import are read, and only in its first `HEAD` characters."""
MOST, LONG, DEEP = 128, 100, 8
"""How many names are guarded, how many characters a name may have, and how many parts."""
_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+([^\n;#]+)|from[ \t]+([\w.]+)[ \t]+import\b)", re.MULTILINE)
_ENDLESS = re.compile(r"(?:import|from)[\s\\]+[\w.]{400}")
"""Names that are too long for Python's parser, whose memory grows with the square of their length."""
_PATCH = re.compile(r"\b(?:setattr|patch|mock|reload|monkeypatch)\b")
_ASSIGNED = re.compile(r"^[ \t]*(\w+)(?:\.\w+)+[ \t]*=[^=]", re.MULTILINE)
"""Signs that a check replaces functions itself."""


class Habits(NamedTuple):
    """What a check relies on."""

    names: tuple[str, ...]
    """The modules that the check imports, and what it uses of them, as dotted names."""
    guarded: bool
    """Whether the program must leave these functions alone, because the check does so itself."""


def habits(check: str) -> Habits:
    """Return what a check relies on, as far as its text shows."""
    if len(check) > SHORT:
        return _skimmed(check)
    if "import" not in check and "builtins" not in check:  # as in most checks
        return Habits((), not _PATCH.search(check))
    return _parsed(check)


@lru_cache(maxsize=256)
def _parsed(check: str) -> Habits:
    if _ENDLESS.search(check):
        return _skimmed(check)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its escapes
            tree = ast.parse(check)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _skimmed(check)
    nodes = [*ast.walk(tree)]
    names, found = _imports(nodes)
    for node in nodes:  # in the order of depth, so that most names are known where they are used
        if isinstance(node, ast.Assign) and (path := _path(node.value, names)):
            names |= {target.id: path for target in node.targets if isinstance(target, ast.Name)}
    replaces = False
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Call) and (path := _path(node, names)):
            found[path] = None
            replaces |= isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    return Habits(_bounded(found), not replaces and not _PATCH.search(check))


class Imports(NamedTuple):
    """What a check imports."""

    names: dict[str, str]
    """Variable → dotted name."""
    found: dict[str, None]
    """The dotted names, in their order."""


def _imports(nodes: list[ast.AST]) -> Imports:
    names, found = {"builtins": "builtins"}, dict[str, None]()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
                found[alias.name] = None
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found[node.module] = None
            for alias in node.names:
                if alias.name != "*":
                    names[alias.asname or alias.name] = path = f"{node.module}.{alias.name}"
                    found[path] = None
    return Imports(names, found)


def _path(node: ast.expr, names: dict[str, str]) -> str:
    """Return the dotted name of an expression that is a module or part of one; nothing for any other."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and len(parts) < DEEP:
        parts.append(node.attr)
        node = node.value
    root = names.get(node.id, "") if isinstance(node, ast.Name) else _imported(node)
    return ".".join((root, *reversed(parts))) if root else ""


def _imported(node: ast.expr) -> str:
    """Return the name of the module that a call of `__import__` or `import_module` returns, if the name is a
    constant."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return ""
    function, name = node.func, node.args[0].value
    called = getattr(function, "id", getattr(function, "attr", ""))
    if not isinstance(name, str) or called not in ("__import__", "import_module"):
        return ""
    return name.partition(".")[0] if called == "__import__" else name


def _skimmed(check: str) -> Habits:
    """Return the modules that a check imports which is too large to be parsed, or invalid. Code that was not read may
    replace functions."""
    found: dict[str, None] = {}
    head = check[:HEAD]
    for match in islice(_IMPORT.finditer(head), MOST):
        several, one = match.groups()
        for name in re.findall(r"[\w.]+", re.sub(r"\bas\s+\w+", "", (several or one)[: 8 * LONG])):
            found[name] = None
    roots = {"builtins", *(name.partition(".")[0] for name in found)}
    replaces = len(check) > HEAD or any(match[1] in roots for match in _ASSIGNED.finditer(head))
    return Habits(_bounded(found), not replaces and not _PATCH.search(head))


def _bounded(found: dict[str, None]) -> tuple[str, ...]:
    return tuple([name for name in found if len(name) <= LONG and name.count(".") < DEEP][:MOST])
