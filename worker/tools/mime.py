"""How a kernel shows things: values in all their forms, errors as text. A part of kernel.py, which is sent as one."""

from __future__ import annotations

import base64
import builtins
import io
import json
import os
import re
import sys
import traceback
import types
from contextlib import suppress
from typing import Any

TEXT = 1 << 20  # the most bytes of one text
SVG = "image/svg+xml"
FORMS = ("text/html", "text/markdown", "text/latex", "image/png", "image/jpeg", "application/json", SVG)
REPRS = {mime: "_repr_{}_".format(re.split("[/+]", mime)[1]) for mime in FORMS}
OURS = globals()


def called(function: Any, *args: Any, **named: Any) -> Any:
    """The door to code that is not ours: what may run a cell's code goes through it, and can be interrupted."""
    return function(*args, **named)


def cut(text: str) -> str:
    """The beginning of it, and only what UTF-8 can say."""
    text = str.__str__(text)  # a class of the cell's may do anything
    data = text[:TEXT].encode("utf-8", "backslashreplace")
    note = f"\n[cut: it has {len(text)} characters]" if max(len(text), len(data)) > TEXT else ""
    return data[:TEXT].decode("utf-8", "ignore") + note


def packed(mime: str, data: Any) -> str:
    """Text as it is, images in base64."""
    if isinstance(data, str) and mime == SVG:
        data = str.encode(data, "utf-8", "replace")
    if isinstance(data, bytes):
        return base64.b64encode(data).decode()
    text = data if isinstance(data, str) else json.dumps(data)
    return cut(text) if mime.startswith("text/") else str.encode(text, "utf-8", "replace").decode()


def bundle(thing: Any) -> dict[str, str]:
    """All that it can be shown as, by MIME type. Only its class is asked: some things claim to have any attribute."""
    kind: Any = type(thing)
    found = {mime: called(getattr(kind, name), thing) for mime, name in REPRS.items() if hasattr(kind, name)}
    if issubclass(kind, getattr(sys.modules.get("matplotlib.figure"), "Figure", ())):
        called(kind.savefig, thing, image := io.BytesIO(), format="png", bbox_inches="tight")
        found["image/png"] = image.getvalue()
    found["text/plain"] = called(repr, thing)
    if hasattr(kind, "_repr_mimebundle_"):
        given = called(kind._repr_mimebundle_, thing, include=None, exclude=None)
        found.update((given[0] if isinstance(given, tuple) else given) or {})
    bare = {mime: data[0] if isinstance(data, tuple) else data for mime, data in found.items()}  # without metadata
    forms = [(mime, data) for mime, data in bare.items() if data is not None][:100]  # nothing honest has more
    return {cut(mime): called(packed, mime, data) for mime, data in forms}


def trim(error: BaseException) -> None:
    """Leave no frame of ours in its traceback or in those of its causes, nor any between ours and the cell's."""
    todo: list[Any] = [error]
    seen = {id(None)}
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        entries, entry = [], each.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        cells = [at for at, entry in enumerate(entries) if entry.tb_frame.f_code.co_filename.startswith("<cell ")]
        start = cells[0] if cells and entries[0].tb_frame.f_globals is OURS else 0
        following = None
        for entry in reversed(entries[start:]):
            if entry.tb_frame.f_globals is not OURS:
                entry.tb_next, following = following, entry
        each.__traceback__ = following
        group = isinstance(each, getattr(builtins, "BaseExceptionGroup", ()))
        todo += [each.__cause__, each.__context__, *(each.exceptions if group else ())]


def described(error: BaseException) -> dict[str, str]:
    """An error as three texts. Even to ask for them may fail, where its class is the cell's."""
    name = value = type.__dict__["__name__"].__get__(type(error))
    text = f"{name}\n"
    with suppress(BaseException):
        value = f"<unprintable {name}>"
        value = called(str, error)
    with suppress(BaseException):
        trim(error)
        form = called(traceback.TracebackException, type(error), error, error.__traceback__)
        text = "".join(form.format() if error.__traceback__ else form.format_exception_only())
    return {"name": cut(name)[:1000], "value": cut(value), "traceback": cut(text)}


def write(fd: int, data: bytes) -> None:
    """All of it, even if some child has made the pipe non-blocking."""
    os.set_blocking(fd, True)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def flush() -> None:
    """What has been printed goes out."""
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        with suppress(BaseException):
            called(getattr(sys, name).flush)


class Shown:
    """Text or bytes to be shown as what they are, as `IPython.display` has them."""

    mime = "text/plain"

    def __init__(self, data: Any = None, filename: str | None = None, **_: Any) -> None:
        if filename is not None or (self.mime.startswith("image/") and isinstance(data, str) and "<svg" not in data):
            with io.FileIO(filename or data) as file:
                data = file.read()
        self.data = data.decode() if isinstance(data, bytes) and self.mime == SVG else data

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {self.mime: self.data}


def stand_in(display: Any) -> None:
    """What notebooks import of IPython, where there is none: to show things."""
    shown = types.ModuleType("IPython.display")
    mimes = {
        "HTML": "text/html", "Markdown": "text/markdown", "Latex": "text/latex", "Math": "text/latex", "SVG": SVG,
        "Image": "image/png", "JSON": "application/json", "Code": "text/plain", "Javascript": "application/javascript",
    }  # fmt: skip
    for name, mime in mimes.items():
        setattr(shown, name, type(name, (Shown,), {"mime": mime}))
    vars(shown).update(display=display, clear_output=lambda *_, **__: None)
    package = types.ModuleType("IPython")
    vars(package).update(display=shown, get_ipython=lambda: None, __path__=[])
    sys.modules.setdefault("IPython", package)
    sys.modules.setdefault("IPython.display", shown)


QUIET = ("matplotlib", "config", "load_ext", "autoreload")  # magics that change nothing here
SHELLS = ("bash", "sh", "pip")


def plain(source: str) -> str:
    """A cell without the marks of notebooks: lines with `!` go to the shell, and those with `%` that we know."""

    bash = "/bin/bash" if os.access("/bin/bash", os.X_OK) else None

    def shell(line: str, check: bool = False) -> str:
        return f"__import__('subprocess').run({line!r}, shell=True, executable={bash!r}, check={check}) and None"

    head, _, rest = source.lstrip().partition("\n")
    if head.strip() in ("%%bash", "%%sh"):
        return shell(rest, check=True)
    lines = []
    for line in source.split("\n"):
        words = line.lstrip()
        space, mark, words = line[: len(line) - len(words)], words[:1], words[1:]
        name = words.partition(" ")[0]
        if mark == "!" or (mark == "%" and name in SHELLS):
            line = space + shell(words)
        elif mark == "%" and name in QUIET:
            line = space + "pass"
        elif mark == "%":
            raise SyntaxError(f"the magic {mark}{name} is not known here")
        elif found := re.fullmatch(r"(\s*)(\w+)\s*=\s*!(.*)", line):
            more = f"shell=True, executable={bash!r}, capture_output=True, text=True"
            run = f"__import__('subprocess').run({found[3]!r}, {more})"
            line = f"{found[1]}{found[2]} = {run}.stdout.splitlines()"
        lines.append(line)
    return "\n".join(lines)
