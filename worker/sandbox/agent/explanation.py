"""Says why a check failed: which assertion it was, and what its values were. All of this comes after the verdict.

Imports nothing of ours but words.py, since a cold interpreter is given these sources and interpreter.py as one text.
"""

import _ast as ast
import faulthandler
import os
import resource
import sys
import time
import types
import warnings
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
if "CHECK" not in globals():
    from .words import CHECK

CHAIN = 4
"""How many errors in a chain of causes get correct lines."""
LARGE = 1 << 14
"""Bytes. A check that has more is not parsed as a whole."""
Explanation = tuple[str, str, str, types.FrameType]
"""What failed; the message; the text to evaluate, or an empty text; and the frame to evaluate it in."""
QUICK, PATIENCE = 0.25, 2.0
"""Seconds of CPU time after which the values of a failed program are not evaluated; and the seconds that this may take.
"""


def explained(
    error: BaseException,
    data: bytes,
    check: types.CodeType,
    limits: "dict[str, float] | None",
    began: float,
) -> "list[Explanation]":
    """Put the lines of the check back into a traceback. Return which assertion failed, if one did, or nothing."""
    if error.__traceback__ is None:
        return []
    found = _with_lines(error, _originals(error.__traceback__.tb_frame.f_code, check))
    if not found or not isinstance(error, AssertionError):
        return []
    frame, place, own = found[0]
    room = limits is not None and _room(limits, began)
    text, message = _assertion(data, place, room) if own else _slice(data.splitlines(), *place), ""
    if not text:
        return []
    shown = _short(" ".join(text.split()), 120)
    if type(error) is AssertionError and error.args and type(error.args[0]) is str:
        message = _short(" ".join(error.args[0].strip().partition("\n")[0].split()))
    if not own:
        return [(f"{shown} raised {type(error).__name__}", f": {message}" if message else "", "", frame)]
    return [(f"assert {shown} failed", f" ({message})" if message else "", text if room else "", frame)]


def _originals(flat: types.CodeType, check: types.CodeType) -> "dict[int, types.CodeType]":
    """Return the code that each flattened code of a check was made from, by the identity of the flattened one."""
    codes: dict[int, types.CodeType] = {}
    pending = [(flat, check)]
    while pending:
        flat, code = pending.pop()
        codes[id(flat)] = code
        pairs = zip(flat.co_consts, code.co_consts, strict=True)
        pending += [pair for pair in pairs if isinstance(pair[1], types.CodeType)]
    return codes


def _with_lines(error: BaseException, codes: "dict[int, types.CodeType]") -> "list[Any]":
    """Correct the lines in the tracebacks of an error and its causes. Return the error's frames that are the check's,
    the last one first: each with its place in the text, and whether it is the last of all."""
    places: dict[tuple[int, int], Any] = {}
    found: list[Any] = []
    each: BaseException | None = error
    for _ in range(CHAIN):
        if each is None:
            break
        row, rest = each.__traceback__, None
        rows = []
        while row is not None:
            rows.append(row)
            row = row.tb_next
        for row in reversed(rows):
            place: Any = None
            spot = id(row.tb_frame.f_code), row.tb_lasti // 2
            if spot[0] in codes:
                place = places.get(spot) or next(islice(codes[spot[0]].co_positions(), spot[1], None))
                places[spot] = place
            if place is not None and each is error:
                found.append((row.tb_frame, place, row is rows[-1]))
            rest = types.TracebackType(rest, row.tb_frame, row.tb_lasti, place[0] if place else row.tb_lineno)
        each.__traceback__ = rest
        each = each.__cause__ or each.__context__
    return found


def tell(explanation: "Explanation", report: int, limits: "dict[str, float]") -> None:
    """Write the explanation to standard error; afterwards the process must end. The values come from evaluating the
    assertion once more: what the program writes meanwhile goes nowhere, and it has little time and memory for that."""
    head, tail, text, frame = explanation
    stderr = os.dup(2)
    os.write(stderr, head.encode("utf-8", "replace"))
    if text:
        try:
            values = _apart(text, frame, report, limits)
            tail = (f": {values}" if values else "") + tail
        except BaseException:
            pass  # the program's own doing: its objects may do anything when they are looked at
    os.write(stderr, (tail + "\n").encode("utf-8", "replace"))


def _assertion(data: bytes, place: "tuple[int, int, int, int]", room: bool) -> str:
    """Return the expression that is asserted at a place of a check, or nothing if no assertion is there. The compiler
    may give the place of any part of an assertion. Most assertions are one line; else the whole check is parsed, if
    there is room for that."""
    line, _, start, _ = place
    own = data.splitlines()[line - 1]
    indented = len(own) - len(own.lstrip())
    for text, at in (
        (own.strip(), (1, start - indented)),
        (data if room and len(data) <= LARGE else b"", (line, start)),
    ):
        try:
            with warnings.catch_warnings(action="ignore"):  # the warnings were given before
                pending: list[Any] = [compile(text, CHECK, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)]
        except SyntaxError:
            continue
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Assert):
                if (node.lineno, node.col_offset) <= at < (node.end_lineno, node.end_col_offset):
                    return _slice(text.splitlines(), *_place(node.test))
            elif not isinstance(node, ast.expr):
                pending += [each for each in _parts(node) if isinstance(each, ast.AST)]
    return ""


def _room(limits: "dict[str, float]", began: float) -> bool:
    """Return whether enough time and memory is left for an explanation that reaches no limit."""
    used, most = sum(os.times()[:4]), int(limits["memory_mib"]) << 20
    late = used > min(QUICK, limits["cpu_seconds"] / 2) or time.monotonic() - began > limits["wall_seconds"] / 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return not late and 3 * peak < most and len(sys._current_frames()) == 1


def _apart(text: str, frame: types.FrameType, report: int, limits: "dict[str, float]") -> str:
    """Return the values, evaluated when the program can no longer write anything."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2, report, report + 1):
        os.dup2(null, fd)
    # This ends the process with the exit code that it has anyway, whatever the interpreter is doing.
    seconds = min(PATIENCE, limits["cpu_seconds"] / 4, limits["wall_seconds"] / 4)
    faulthandler.dump_traceback_later(seconds, exit=True, file=null)
    with open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize()
    most += (int(limits["memory_mib"]) << 20) // 6
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    values = _evaluated(text, frame)[:600]
    return "".join(each if each.isprintable() else "\ufffd" for each in values)


def _evaluated(text: str, frame: types.FrameType) -> str:
    """Return the values in an expression that is false: those that are compared, and those of each call."""
    shown: dict[str, str] = {}
    lines = f"({text})".encode().splitlines()
    scopes = ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.JoinedStr
    plain = ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.UnaryOp | ast.unaryop | ast.expr_context

    def literal(node: "Any") -> bool:
        return not isinstance(node, ast.AST) or (isinstance(node, plain) and all(map(literal, _parts(node))))

    def named(node: "Any", top: bool) -> "Any":
        """Return the same node, which also stores its value under a name, as its parts do."""
        joint = isinstance(node, ast.BoolOp | ast.Compare) or isinstance(getattr(node, "op", None), ast.Not)
        if not isinstance(node, ast.AST) or literal(node) or isinstance(node, ast.NamedExpr):
            return node
        name = f"_value_{len(shown)}"
        wanted = isinstance(node, ast.Call) or (top and not joint and isinstance(node, ast.expr))
        if wanted:
            verb = "gave" if isinstance(node, ast.Call) else "is"
            shown[name] = f"{_short(' '.join(_slice(lines, *_place(node)).split()), 60)} {verb}"
        if not isinstance(node, scopes):
            for field in node._fields:
                value = getattr(node, field, None)
                inner = [named(each, top and joint) for each in value] if isinstance(value, list) else None
                setattr(node, field, named(value, top and joint) if inner is None else inner)
        if not wanted:
            return node
        spot = {each: getattr(node, each) for each in node._attributes}
        target = ast.Name(id=name, ctx=ast.Store(), **spot)
        return ast.NamedExpr(target=target, value=node, **spot)  # type: ignore[arg-type]

    tree: Any = compile(f"({text})", CHECK, "eval", ast.PyCF_ONLY_AST, dont_inherit=True)
    tree.body = named(tree.body, True)
    space = {**frame.f_globals, **frame.f_locals}
    if eval(compile(tree, CHECK, "eval", dont_inherit=True), space):
        return ""  # this time it is true
    return ", ".join(f"{words} {_short(repr(space[name]))}" for name, words in [*shown.items()][:4] if name in space)


def _parts(node: "Any") -> "list[Any]":
    values = [getattr(node, field, None) for field in node._fields]
    return [each for value in values for each in (value if isinstance(value, list) else [value])]


def _place(node: "Any") -> "tuple[int, int, int, int]":
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _slice(lines: "list[bytes]", line: int, end_line: int, start: int, end: int) -> str:
    """Return the part of a text that is at a place."""
    taken = lines[line - 1 : end_line]
    taken[-1] = taken[-1][:end]
    taken[0] = taken[0][start:]
    return b"\n".join(taken).decode("utf-8", "replace")


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
