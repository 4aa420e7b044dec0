"""A job: one program with its tool, its checks and its limits."""

import base64
import binascii
import hashlib
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from schemas.base import MAX_ITEMS, Given
from schemas.limits import Limits
from schemas.verdict import Priority

MAX_TEXT = 10 << 20
"""Bytes of any one text of a job: its code, its check, its standard input, one file."""
MAX_JOB = 32 << 20
"""Bytes of all texts of a job together."""
MAX_CASES = MAX_ITEMS
LANGUAGES = {
    "python_executor": ("python",),
    "shell_executor": ("bash",),
    "notebook_executor": ("python",),
    "multi_code_executor": (
        "python", "bash", "c", "cpp", "csharp", "java", "javascript", "typescript", "go", "go_test", "rust",
        "rust_test", "elixir", "lua", "ocaml", "pascal", "perl", "php", "r", "ruby", "scheme", "sqlite", "tcl",
    ),
}  # fmt: skip
"""What each tool can run; the tools themselves are in worker/tools."""
ALIASES = {"bash": "shell_executor"}
SPELLINGS = {
    "py": "python", "python3": "python", "sh": "bash", "shell": "bash", "c++": "cpp", "c#": "csharp", "cs": "csharp",
    "js": "javascript", "node": "javascript", "nodejs": "javascript", "ts": "typescript", "golang": "go", "rs": "rust",
    "ml": "ocaml", "pl": "perl", "rb": "ruby", "sql": "sqlite", "sqlite3": "sqlite",
}  # fmt: skip
"""Other words for languages."""
COMPARATORS = "exact, rstrip, tokens, float:REL[,ABS], lcb, json, json:unwrap, checker"

_CARRIED = {"task_id", "sample_id", "labels", "priority"}
"""What a job only carries along."""
_COMPARATOR = re.compile(r"exact|rstrip|tokens|lcb|json|json:unwrap|checker|float:[0-9.eE+-]+(,[0-9.eE+-]+)?")


def _bounded(text: str) -> str:
    size = len(text) if text.isascii() else len(text.encode())
    if size > MAX_TEXT:
        raise ValueError(f"{size:,} bytes; at most {MAX_TEXT:,} (10 MiB) are taken")
    return text


def _argument(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL, which no process can be given")
    return _bounded(text)


def _variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError(f"{name!r} is no name of an environment variable")
    return _argument(name)


def _path(path: str) -> str:
    parts = PurePosixPath(_argument(path)).parts
    if not parts or parts[0] == "/" or ".." in parts or path.endswith("/"):
        raise ValueError(f"{path!r} must be a relative path of a file, without '..'")
    if max(map(len, map(str.encode, parts))) > 255 or len(path.encode()) > 1024:
        raise ValueError(f"{path[:40]!r}… is longer than a file system takes")
    return "/".join(parts)


def _content(content: str) -> str:
    if content.startswith("base64:"):
        try:
            base64.b64decode(content[7:], validate=True)
        except binascii.Error as error:
            raise ValueError(f"not valid base64 ({error})") from None
    return _bounded(content)


def _comparator(name: str) -> str:
    margins = name.removeprefix("float:").split(",") if name.startswith("float:") else []
    try:
        known = _COMPARATOR.fullmatch(name) is not None and all(float(margin) >= 0 for margin in margins)
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"unknown comparator {name!r}; known: {COMPARATORS}")
    return name


def _tool(name: str) -> str:
    name = ALIASES.get(name, name)
    if name not in LANGUAGES:
        raise ValueError(f"unknown tool {name!r}; known: {', '.join([*LANGUAGES, *ALIASES])}")
    return name


def _language(name: str) -> str:
    return SPELLINGS.get(name.lower(), name.lower())


def _other(language: Any) -> bool:
    """Whether it is named, and not Python."""
    return isinstance(language, str) and _language(language) != "python"


Text = Annotated[str, AfterValidator(_bounded)]
Argument = Annotated[str, AfterValidator(_argument)]
Name = Annotated[str, AfterValidator(_bounded)] | int
Scalar = Annotated[str, AfterValidator(_bounded)] | int | float | bool | None


class Case(Given):
    """One standard input and the output it should give. The expected output never enters the sandbox."""

    stdin: Text = ""
    expected: Text
    args: tuple[Argument, ...] = ()
    comparator: Annotated[str, AfterValidator(_comparator)] = "rstrip"

    def __init__(self, /, stdin: str = "", expected: str | None = None, **fields: Any) -> None:
        if expected is not None:
            fields["expected"] = expected
        super().__init__(stdin=stdin, **fields)


class JobSpec(Given):
    """What a caller asks for. Frozen; unknown fields are refused."""

    code: Text
    """The program."""
    tool: Annotated[str, AfterValidator(_tool)] = "python_executor"
    language: Annotated[str, AfterValidator(_language)] = "python"
    """For `multi_code_executor`, which is the tool of a job that names a language alone."""
    stdin: Text = ""
    args: tuple[Argument, ...] = ()
    env: dict[Annotated[str, AfterValidator(_variable)], Argument] = Field(default_factory=dict)
    files: dict[Annotated[str, AfterValidator(_path)], Annotated[str, AfterValidator(_content)]] = Field(
        default_factory=dict
    )
    """Relative path → text, or bytes as base64 behind the prefix `base64:`."""
    check: Text | None = None
    """Assert-style test program, run after `code` in the same interpreter."""
    cases: tuple[Case, ...] = Field(default=(), max_length=MAX_CASES)
    entry_point: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$", max_length=255)
    """The function of a Python program that is asked for. With cases, it is called for each, be it one of the class
    `Solution`: the case's standard input is a JSON list of arguments, and the value, as JSON, is the output. With a
    check, it is the only global by the name of a builtin that the check sees."""
    checker: Text | None = None
    """A Python program that decides about cases with the comparator `checker`, in a sandbox of its own: its arguments
    name files with the input, the output and the expected one; exit code 0 accepts, 1 rejects."""
    stop_early: bool = True
    """Stop at the first case that fails."""
    limits: Limits = Limits()
    image: str | None = Field(default=None, min_length=1, max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9./:@_-]*$")
    """Any local image; `None` means the one of the worker's settings."""
    isolation: Literal["warm", "fresh"] = "warm"
    """`warm`: a sandbox that was reset and verified; `fresh`: one that has never run anything."""
    task_id: Name | None = None
    sample_id: Name | None = None
    labels: dict[Annotated[str, AfterValidator(_bounded)], Scalar] | None = None
    priority: Priority = Priority.NORMAL

    @model_validator(mode="before")
    @classmethod
    def _by_language(cls, given: Any) -> Any:
        """A language says which tool is meant."""
        if isinstance(given, dict) and "tool" not in given and _other(given.get("language")):
            return given | {"tool": "multi_code_executor"}
        return given

    @model_validator(mode="after")
    def _whole(self) -> "JobSpec":
        if self.tool != "multi_code_executor" and _other(self.language) and self.language not in LANGUAGES[self.tool]:
            raise ValueError(f"language: {self.tool} does not run {self.language}; multi_code_executor may")
        if self.tool == "multi_code_executor" and self.language not in LANGUAGES[self.tool]:
            known = ", ".join(LANGUAGES[self.tool])
            raise ValueError(f"language: {self.language!r} is not one of {known}")
        folders = {str(folder) for path in self.files for folder in PurePosixPath(path).parents}
        if both := folders & {str(PurePosixPath(path)) for path in self.files}:
            raise ValueError(f"files: {min(both)!r} cannot be a file and a folder")
        if self.check is not None and (self.runs != "python" or self.tool == "notebook_executor"):
            raise ValueError(
                "check: an assert-style check needs a Python program that is no notebook; use cases instead"
            )
        if self.check is not None and self.cases:
            raise ValueError("cases: a job has a check or cases, not both")
        called = self.runs == "python" and self.tool != "notebook_executor" and (self.cases or self.check)
        if self.entry_point is not None and not called:
            raise ValueError("entry_point: it needs a Python program with cases or a check")
        if (self.checker is None) == any(case.comparator == "checker" for case in self.cases):
            raise ValueError("checker: it belongs to cases with the comparator 'checker', and they to it")
        texts = [
            self.code,
            self.stdin,
            self.check or self.checker or "",
            *self.args,
            *self.env.values(),
            *self.files.values(),
        ]
        if sum(map(len, texts)) + sum(len(case.stdin) + len(case.expected) for case in self.cases) > MAX_JOB:
            raise ValueError(f"code: with its files and cases the job is over {MAX_JOB >> 20} MiB")
        return self

    def digest(self, made_by: str) -> str:
        """A hash of all that decides its result: what it says itself, and what it is made by."""
        decisive = self.model_dump_json(exclude=_CARRIED, exclude_defaults=True)
        return hashlib.sha256(f"{made_by}\n{decisive}".encode()).hexdigest()[:32]

    @property
    def runs(self) -> str:
        """The language the program is run as, whatever the tool."""
        return self.language if self.tool == "multi_code_executor" else LANGUAGES[self.tool][0]
