"""The reference pages from the code: what a line such as `::: evalpool.submit_job` or `::: command line` stands for."""

import ast
import enum
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

WIDTH = 76
"""Characters of a line of code that fit on a page."""


def markdown(name: str) -> str:
    """The Markdown for `::: name`: a public function or class by its dotted name, or the `command line`."""
    if name == "command line":
        return "\n".join(_commands())
    module, _, attribute = name.rpartition(".")
    thing = getattr(import_module(module), attribute)
    if not inspect.getdoc(thing):
        raise ValueError(f"{name} has no docstring")
    return "\n".join(_function(thing, "###") if inspect.isfunction(thing) else _class(thing))


def _function(function: Any, heading: str) -> Iterator[str]:
    """A function or a method: its name, its signature as it is written, its docstring."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = [each for each in (*node.args.posonlyargs, *node.args.args) if each.arg == "self"]
    for each in arguments:
        (node.args.posonlyargs if each in node.args.posonlyargs else node.args.args).remove(each)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    word = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    yield from [f"{heading} `{node.name}`", "", "```{.python .signature}"]
    yield from [_wrapped(f"{word}{node.name}", ast.unparse(node.args), returns), "```", ""]
    yield from [inspect.getdoc(function) or "", ""]


def _wrapped(name: str, arguments: str, returns: str) -> str:
    """A signature on one line, or with a line for each argument if it is long."""
    if len(name + arguments + returns) < WIDTH:
        return f"{name}({arguments}){returns}"
    depth, lines = 0, [""]
    for letter in arguments:
        depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            lines.append("")
        else:
            lines[-1] += letter
    return "\n".join([f"{name}(", *(f"    {line.strip()}," for line in lines), f"){returns}"])


def _class(cls: Any) -> Iterator[str]:
    """A class: its docstring, then its fields or members in a table, then its methods."""
    yield from [f"### `{cls.__name__}`", "", inspect.getdoc(cls) or "", ""]
    told = _attribute_docstrings(cls)
    if issubclass(cls, enum.Enum):
        yield from ["| value | meaning |", "|---|---|"]
        yield from [f"| `{member.value}` | {told.get(member.name, '')} |" for member in cls]
    elif issubclass(cls, BaseModel):
        yield from ["| field | type | default | meaning |", "|---|---|---|---|"]
        for name, field in cls.model_fields.items():
            default = "required" if field.is_required() else f"`{_default(field)}`"
            yield f"| `{name}` | `{spell(field.annotation)}` | {default} | {told.get(name, '')} |"
        for name, computed in cls.model_computed_fields.items():
            meaning = _line(computed.description or "")
            yield f"| `{name}` | `{spell(computed.return_type)}` | computed | {meaning} |"
    yield ""
    if not issubclass(cls, enum.Enum | BaseModel | Exception):
        for name, method in vars(cls).items():
            if name[0] != "_" and inspect.isfunction(method) and inspect.getdoc(method):
                yield from _function(method, "####")


def _default(field: Any) -> str:
    if field.default is not PydanticUndefined:
        value = field.default
        return f"{type(value).__name__}()" if isinstance(value, BaseModel) else repr(getattr(value, "value", value))
    return repr(field.default_factory())


def _attribute_docstrings(cls: type) -> dict[str, str]:
    """Attribute → the docstring below it."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    told = {}
    for before, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            target = before.target if isinstance(before, ast.AnnAssign) else getattr(before, "targets", [None])[0]
            if isinstance(target, ast.Name):
                told[target.id] = _line(after.value.value)
    return told


def spell(kind: Any) -> str:
    """A type as one would write it, without what only validation needs."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return spell(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(spell, arguments))
    if origin is typing.Literal:
        return " | ".join(map(repr, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(spell, arguments))}]"
    return {type(None): "None", ...: "..."}.get(kind) or getattr(kind, "__name__", str(kind))


def _line(text: str) -> str:
    """A docstring as the cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _commands() -> Iterator[str]:
    """Every command with its help, as the terminal shows it."""
    import typer

    from evalpool.api.cli import app

    yield from _help(typer.main.get_command(app), "evalpool")


def _help(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    context = command.context_class(command, info_name=name if parent is None else name.split()[-1], parent=parent)
    context.terminal_width = 100
    commands = getattr(command, "commands", {})
    if not commands or parent is None:
        yield from [f"## `{name}`", "", "```text", command.get_help(context), "```", ""]
    for each in commands.values():
        yield from _help(each, f"{name} {each.name}", context)
