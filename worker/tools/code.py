"""The tools that run a program's text, and what is compiled before it."""

import base64
import re
from functools import lru_cache

from schemas.job import Case, JobSpec
from worker.sandbox.base import Program
from worker.tools.base import Tool
from worker.tools.languages import COMPILE, LANGUAGES, PACK, PACKED, UNPACK, filled

CALL = """

import json as _json, os as _os, re as _re, sys as _sys
_answer = _os.dup(1)
_os.dup2(2, 1)  # what the function prints is not its answer
_sys.stdout.flush()
_sys.stdout = _sys.stderr
_arguments = [
    {int(key): value for key, value in each.items()}
    if %s and isinstance(each, dict) and each and all(_re.fullmatch("-?[0-9]+", key) for key in each) else each
    for each in _json.load(_sys.stdin)
]
_home = Solution() if hasattr(globals().get("Solution"), "%s") else _sys.modules["__main__"]
_value = getattr(_home, "%s")(*_arguments)
_text = _json.dumps(_value, default=lambda odd: odd.tolist() if hasattr(odd, "tolist") else repr(odd))
while _text:
    _text = _text[_os.write(_answer, _text.encode()) :]
"""
"""Put behind a program whose function is called: arguments come as a JSON list, the value goes as JSON. Numbers that
were keys of a dictionary have become texts by that; APPS, whose comparator is `json:unwrap`, wants them back. The
program may tamper with all of this: it would only forge its own answer, and what is expected is not in here."""

SHORT = 1 << 16
"""Characters of a check whose habits are remembered: the samples of a problem have the same one."""
_IMPORT = re.compile(r"(?:^|[;:])[ \t]*(?:import[ \t]+([^\n;#]+)|from[ \t]+([\w.]+)[ \t]+import\b)", re.MULTILINE)
_PATCH = re.compile(r"\b(?:setattr|patch|mock|reload|monkeypatch)\b")
_ASSIGNED = re.compile(r"^[ \t]*(\w+)(?:\.\w+)+[ \t]*=[^=]", re.MULTILINE)
"""Signs that a check replaces functions itself."""


class MultiCodeExecutor(Tool):
    """Runs a program of any language in the table."""

    name = "multi_code_executor"

    def program(self, spec: JobSpec, case: Case | None, compiled: bytes | None = None) -> Program:
        language = LANGUAGES[spec.runs]
        given = spec if case is None else case
        check = spec.check or ""
        code = spec.code
        if spec.entry_point and case is not None:
            code += CALL % (case.comparator == "json:unwrap", spec.entry_point, spec.entry_point)
        tools, guarded = _habits(check) if len(check) <= SHORT else _habits.__wrapped__(check)
        run = tuple(filled(word, spec) for word in language.run)
        return Program(
            code=code.encode() if compiled is None else compiled,
            main=filled(language.main, spec) if compiled is None else PACKED,
            argv=run if compiled is None else (*UNPACK, *run),
            args=given.args,
            stdin=given.stdin.encode(),
            env=language.env | spec.env,
            files=_files(spec),
            check=None if spec.check is None else check.encode(),
            tools=tools,
            guarded=guarded,
            subject=spec.entry_point,
            limits=spec.limits,
        )

    def compiler(self, spec: JobSpec) -> Program | None:
        language = LANGUAGES[spec.runs]
        if not language.compile:
            return None
        limits, least = spec.limits, COMPILE
        roomy = {
            name: max(getattr(limits, name), getattr(least, name)) for name in ("memory_mib", "processes", "disk_mib")
        }
        return Program(
            code=spec.code.encode(),
            main=filled(language.main, spec),
            argv=("sh", "-c", PACK % filled(language.compile, spec)),
            env=language.env,
            files=_files(spec),
            limits=least.model_copy(update=roomy),
        )


class PythonExecutor(MultiCodeExecutor):
    """Runs Python in an interpreter forked from a warm one."""

    name = "python_executor"


class ShellExecutor(MultiCodeExecutor):
    """Runs a bash script."""

    name = "shell_executor"


@lru_cache(maxsize=256)
def _habits(check: str) -> tuple[tuple[str, ...], bool]:
    """The modules that a check imports, and those that they are in; and whether it leaves their functions alone."""
    found: dict[str, None] = {}
    for several, one in _IMPORT.findall(check):
        for name in re.findall(r"[\w.]+", re.sub(r"\bas\s+\w+", "", several or one)):
            parts = name.split(".")
            found |= dict.fromkeys(".".join(parts[: length + 1]) for length in range(len(parts)))
    return tuple(found), not _PATCH.search(check) and {*found, "builtins"}.isdisjoint(_ASSIGNED.findall(check))


def _files(spec: JobSpec) -> dict[str, bytes]:
    return {path: _bytes(content) for path, content in spec.files.items()}


def _bytes(content: str) -> bytes:
    return base64.b64decode(content[7:]) if content.startswith("base64:") else content.encode()
