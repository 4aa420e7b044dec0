"""A job: one program with its tool, its checks and its limits."""

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from evalpool.schemas.base import MAX_ITEMS, Given, must_be
from evalpool.schemas.limits import Limits
from evalpool.schemas.verdict import Priority

MAX_TEXT = 10 << 20
"""The most bytes of one text of a job: its code, its check, its standard input or one of its files."""
MAX_JOB = 32 << 20
"""The most bytes of all texts of a job together."""
MAX_CASES = MAX_ITEMS
LANGUAGES = {
    "python_executor": ("python",),
    "shell_executor": ("bash",),
    "notebook_executor": ("python",),
    "multi_code_executor": (
        "python", "bash", "c", "c11", "cpp", "cpp14", "cpp20", "cpp23", "csharp", "java", "javascript", "typescript",
        "go", "go_test", "rust", "rust_test", "elixir", "lua", "ocaml", "pascal", "perl", "php", "r", "ruby", "scheme",
        "sqlite", "tcl",
    ),
}  # fmt: skip
"""Tool → the languages that it runs. The tools themselves are in worker/tools."""
ALIASES = {"bash": "shell_executor"}
SPELLINGS = {
    "py": "python", "python3": "python", "sh": "bash", "shell": "bash", "c17": "c", "c++": "cpp", "cpp17": "cpp",
    "c++17": "cpp", "c++14": "cpp14", "c++20": "cpp20", "c++23": "cpp23", "c#": "csharp", "cs": "csharp",
    "js": "javascript", "node": "javascript", "nodejs": "javascript", "ts": "typescript", "golang": "go", "rs": "rust",
    "ml": "ocaml", "pl": "perl", "rb": "ruby", "sql": "sqlite", "sqlite3": "sqlite",
}  # fmt: skip
"""Other spelling of a language → its name."""
COMPARATORS = "exact, rstrip, tokens, float:REL[,ABS], lcb, json, json:unwrap, checker"
MAX_COMPARATOR = 64
"""The most characters of a comparator's name, which is stored in every result."""

_CARRIED = {"task_id", "sample_id", "labels", "priority"}
"""Fields that are copied to the result and do not decide it."""
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9./:@_-]*")
_COMPARATOR = re.compile(r"exact|rstrip|tokens|lcb|json|json:unwrap|checker|float:[0-9.eE+-]+(,[0-9.eE+-]+)?")


def _bounded(text: str) -> str:
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise ValueError("it contains an unpaired surrogate, which is not valid text") from None
    if size > MAX_TEXT:
        raise ValueError(f"it has {size:,} bytes; at most {MAX_TEXT:,} (10 MiB) are allowed")
    return text


def _argument(text: str) -> str:
    if "\0" in text:
        raise ValueError("it contains a NUL character, which cannot be passed to a process")
    return _bounded(text)


def _variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError(f"{name!r} is not a valid name for an environment variable")
    return _argument(name)


def _path(path: str) -> str:
    parts = PurePosixPath(_argument(path)).parts
    if not parts or parts[0] == "/" or ".." in parts or path.endswith("/"):
        raise ValueError(f"{path!r} must be a relative path of a file, without '..'")
    if max(map(len, map(str.encode, parts))) > 255 or len(path.encode()) > 1024:
        raise ValueError(f"{path[:40]!r}… is too long; at most 255 bytes per part and 1,024 in all are allowed")
    return "/".join(parts)


def _content(content: str) -> str:
    if content.startswith("base64:"):
        try:
            base64.b64decode(content[7:], validate=True)
        except binascii.Error as error:
            raise ValueError(f"it is not valid base64 ({error})") from None
    return _bounded(content)


def _comparator(name: str) -> str:
    margins = name.removeprefix("float:").split(",") if name.startswith("float:") else []
    try:
        known = len(name) <= MAX_COMPARATOR and _COMPARATOR.fullmatch(name) is not None
        known = known and all(float(margin) >= 0 for margin in margins)
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"unknown comparator {name[:MAX_COMPARATOR]!r}; the comparators are {COMPARATORS}")
    return name


def image_name(name: str) -> str:
    """Return the name of an image, or raise `ValueError` if it cannot be one."""
    if not _IMAGE.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid image name; write it like 'python:3.11' or 'evalpool/python:3.11'")
    return name


def _function(name: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not a valid function name")
    return name


def _tool(name: str) -> str:
    name = ALIASES.get(name, name)
    if name not in LANGUAGES:
        raise ValueError(f"unknown tool {name!r}; the tools are {', '.join([*LANGUAGES, *ALIASES])}")
    return name


def _language(name: str) -> str:
    return SPELLINGS.get(name.lower(), name.lower())


def _other(language: Any) -> bool:
    """Whether a language is named that is not Python."""
    return isinstance(language, str) and _language(language) != "python"


Text = Annotated[str, AfterValidator(_bounded)]
Argument = Annotated[str, AfterValidator(_argument)]
Name = Annotated[Text | int, must_be("text or a whole number")]
Scalar = Annotated[Text | int | float | bool | None, must_be("text, a number, true, false or null")]


class Case(Given):
    """A standard input and the output that is expected for it. The expected output never enters the sandbox."""

    stdin: Text = ""
    """The standard input of this run."""
    expected: Text
    """The standard output that is right."""
    args: tuple[Argument, ...] = ()
    """Command-line arguments of this run, in place of those of the job."""
    comparator: Annotated[str, AfterValidator(_comparator)] = "rstrip"
    """How the output is compared with what is expected; docs/benchmarks.md lists the comparators."""

    def __init__(
        self,
        /,
        stdin: str = "",
        expected: str | None = None,
        args: Sequence[str] = (),
        comparator: str = "rstrip",
        **fields: Any,
    ) -> None:
        if expected is not None:
            fields["expected"] = expected
        super().__init__(stdin=stdin, args=args, comparator=comparator, **fields)


class JobSpec(Given):
    """A job as its caller describes it. Specs are frozen, and unknown fields are rejected."""

    code: Text
    """The program."""
    tool: Annotated[str, AfterValidator(_tool)] = "python_executor"
    """How the code is executed: `python_executor`, `shell_executor` (alias `bash`), `multi_code_executor` or
    `notebook_executor`."""
    language: Annotated[str, AfterValidator(_language)] = "python"
    """The language for `multi_code_executor`, which is also the tool of a job that names only a language."""
    stdin: Text = ""
    """The standard input of the program, if there are no cases."""
    args: tuple[Argument, ...] = ()
    """Command-line arguments of the program."""
    env: dict[Annotated[str, AfterValidator(_variable)], Argument] = Field(default_factory=dict)
    """Environment variables of the program, besides the few that every program gets."""
    files: dict[Annotated[str, AfterValidator(_path)], Annotated[str, AfterValidator(_content)]] = Field(
        default_factory=dict
    )
    """Relative path → text, or bytes as base64 with the prefix `base64:`."""
    check: Text | None = None
    """An assert-style test program, which is run after `code` in the same interpreter."""
    cases: tuple[Case, ...] = Field(default=(), max_length=MAX_CASES)
    """Inputs with their expected outputs. The program is compiled once and run once per case."""
    entry_point: Annotated[str, AfterValidator(_function)] | None = Field(default=None, max_length=255)
    """The function of a Python program that is tested. With cases, this function, or the method of this name of the
    class `Solution`, is called for each case: the standard input is a JSON list of arguments, and the returned value,
    as JSON, is the output. With a check, the function may have the name of a builtin; other globals of the program with
    such a name are hidden from the check."""
    checker: Text | None = None
    """A Python program that decides about cases with the comparator `checker`, in a sandbox of its own. Its arguments
    name files with the input, the output and the expected output; exit code 0 accepts the output, and 1 rejects it."""
    stop_early: bool = True
    """Whether to stop at the first case that fails."""
    limits: Limits = Limits()
    """What the program may use."""
    image: Annotated[str, AfterValidator(image_name)] | None = Field(default=None, max_length=255)
    """The name of any local image; `None` means the image that the settings choose."""
    isolation: Literal["warm", "fresh"] = "warm"
    """`warm`: a sandbox that was used before, reset and verified; `fresh`: a sandbox that has never run a program."""
    task_id: Name | None = None
    """The problem that the program solves. Samples of one task are scored together."""
    sample_id: Name | None = None
    """Which sample of its task the program is."""
    labels: dict[Annotated[str, AfterValidator(_bounded)], Scalar] | None = None
    """Labels of the caller's own, which come back in the result."""
    priority: Priority = Priority.NORMAL
    """Jobs of a higher priority are claimed first, within fair shares."""

    @model_validator(mode="before")
    @classmethod
    def _by_language(cls, given: Any) -> Any:
        """Choose the tool for a job that names only a language."""
        if isinstance(given, dict) and "tool" not in given and _other(given.get("language")):
            return given | {"tool": "multi_code_executor"}
        return given

    @model_validator(mode="after")
    def _language_fits(self) -> "JobSpec":
        known = LANGUAGES[self.tool]
        if self.tool == "multi_code_executor" and self.language not in known:
            raise ValueError(f"language: {self.language!r} is not one of {', '.join(known)}")
        if self.language not in (*known, "python"):  # the default, which tools for other languages ignore
            raise ValueError(
                f"language: {self.tool} does not run {self.language}; multi_code_executor runs other languages"
            )
        return self

    @model_validator(mode="after")
    def _files_fit(self) -> "JobSpec":
        # In this order a folder stands right before what is in it. A list of all folders could be long.
        paths = sorted(self.files, key=lambda path: path.replace("/", "\0"))
        if both := [path for path, other in pairwise(paths) if other.startswith(f"{path}/")]:
            raise ValueError(f"files: {both[0]!r} cannot be both a file and a folder")
        return self

    @model_validator(mode="after")
    def _checks_fit(self) -> "JobSpec":
        script = self.runs == "python" and self.tool != "notebook_executor"
        if self.check is not None and not script:
            raise ValueError("check: an assert-style check needs a Python program, not a notebook; use cases instead")
        if self.check is not None and self.cases:
            raise ValueError("cases: a job can have a check or cases, but not both")
        if self.entry_point is not None and not (script and (self.cases or self.check)):
            raise ValueError("entry_point: an entry point needs a Python program with cases or a check")
        if (self.checker is None) == any(case.comparator == "checker" for case in self.cases):
            raise ValueError(
                "checker: a checker needs cases with the comparator 'checker', and such cases need a checker"
            )
        return self

    @model_validator(mode="after")
    def _size_fits(self) -> "JobSpec":
        texts = [self.code, self.stdin, self.check or self.checker or ""]
        size = sum(map(len, (*texts, *self.args, *self.env.values(), *self.files.values())))
        if size + sum(len(case.stdin) + len(case.expected) for case in self.cases) > MAX_JOB:
            raise ValueError(f"code: the job with its files and cases is larger than {MAX_JOB >> 20} MiB")
        return self

    def digest(self, made_by: str) -> str:
        """A hash of everything that decides the result: the job itself and `made_by`, see `schemas.images`."""
        decisive = self.model_dump_json(exclude=_CARRIED, exclude_defaults=True)
        return hashlib.sha256(f"{made_by}\n{decisive}".encode()).hexdigest()[:32]

    @property
    def runs(self) -> str:
        """The language of the program, whatever the tool is."""
        return self.language if self.tool == "multi_code_executor" else LANGUAGES[self.tool][0]
