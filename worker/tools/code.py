"""The tools that run a program's text, and what is compiled before it."""

import re
import secrets
from functools import lru_cache
from typing import Any

from pydantic import Field

from schemas.errors import InvalidJob
from schemas.job import Case, JobSpec
from schemas.limits import Limits
from schemas.sandbox import ExecutionStatus, ToolResult
from worker.sandbox.base import Command, Program
from worker.tools.base import JobTool, Place, Seconds, ToolOptions, ToolParameters, files_of
from worker.tools.languages import COMPILE, LANGUAGES, PACK, PACKED, UNPACK, Language, filled
from worker.tools.notebook import Kernel
from worker.tools.registry import register_tool

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

NOT_FOUND = 127
"""The exit code of a shell that does not find a program."""
SHORT = 1 << 16
"""Characters of a check whose habits are remembered: the samples of a problem have the same one."""
_IMPORT = re.compile(r"(?:^|[;:])[ \t]*(?:import[ \t]+([^\n;#]+)|from[ \t]+([\w.]+)[ \t]+import\b)", re.MULTILINE)
_PATCH = re.compile(r"\b(?:setattr|patch|mock|reload|monkeypatch)\b")
_ASSIGNED = re.compile(r"^[ \t]*(\w+)(?:\.\w+)+[ \t]*=[^=]", re.MULTILINE)
"""Signs that a check replaces functions itself."""


class TextTool(JobTool):
    """Turns a job with a program's text into runs of it."""

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
            files=_beside(language, spec),
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
            files=_beside(language, spec),
            limits=least.model_copy(update=roomy),
        )


@register_tool("python_executor")
class PythonExecutor(TextTool):
    """Execute a Python program. Each starts clean, unless the calls are asked to share their state."""

    class Parameters(ToolParameters):
        code: str = Field(description="Python code to execute")
        timeout: Seconds | None = Field(default=None, description="Execution timeout in seconds")
        stateful: bool | None = Field(default=None, description="Keep variables for the next stateful call")

    class Options(ToolOptions):
        stateful: bool = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kernel = Kernel()

    async def execute(
        self, sandbox_context: Place, code: str, timeout: float | None = None, stateful: bool | None = None
    ) -> ToolResult:
        if not code.strip():
            return self.failure("No code provided")
        timeout = self.seconds(sandbox_context, timeout)
        if self.options.stateful if stateful is None else stateful:  # type: ignore[attr-defined]
            cell = await self._kernel.run(sandbox_context, code, timeout)
            return self.result(cell.stdout, status=cell.status, error=cell.complaint, metadata=cell.metadata)
        return self.of_command(await sandbox_context.execute_python(code, timeout), timeout)


@register_tool("shell_executor")
class ShellExecutor(TextTool):
    """Execute a shell command: a line for bash, or a program with its arguments."""

    class Parameters(ToolParameters):
        command: str | list[str] = Field(description="A line for bash, or a list of a program and its arguments")
        timeout: Seconds | None = Field(default=None, description="Execution timeout in seconds")

    async def execute(
        self, sandbox_context: Place, command: str | list[str], timeout: float | None = None
    ) -> ToolResult:
        if not (command.strip() if isinstance(command, str) else command):
            return self.failure("No command provided")
        timeout = self.seconds(sandbox_context, timeout)
        return self.of_command(await sandbox_context.execute_command(command, timeout), timeout, "Command")


@register_tool("multi_code_executor")
class MultiCodeExecutor(TextTool):
    """Execute a program in one of many languages; it is compiled first where it must be."""

    class Parameters(ToolParameters):
        language: str = Field(description="The language", json_schema_extra={"enum": [*LANGUAGES]})
        code: str = Field(description="The program")
        files: dict[str, str] = Field(default_factory=dict, description="Files beside it: name to text")
        compile_timeout: Seconds | None = Field(default=None, description="Seconds for the compiler")
        run_timeout: Seconds | None = Field(default=None, description="Seconds for the program")
        stdin: str = Field(default="", description="What it can read from standard input")

    async def execute(
        self,
        sandbox_context: Place,
        language: str,
        code: str,
        files: dict[str, str] | None = None,
        compile_timeout: float | None = None,
        run_timeout: float | None = None,
        stdin: str = "",
    ) -> ToolResult:
        memory = Limits(memory_mib=sandbox_context.config.memory_mib)
        try:
            spec = JobSpec(code=code, tool=self.name, language=language, files=files or {}, limits=memory)
        except InvalidJob as error:
            unknown = str(error).startswith("language:")
            words = f"Unsupported language: {language}; known: {', '.join(LANGUAGES)}"
            return self.failure(words if unknown else f"Invalid input: {error}")
        known, folder = LANGUAGES[spec.runs], f".code-{secrets.token_hex(4)}"
        given = files_of(spec) | {filled(known.main, spec): code.encode()}
        argv = tuple(filled(word, spec) for word in known.run) or ("python3", known.main)
        here = f"{sandbox_context.config.working_dir}/{folder}"
        env = {name: value.replace("/box", here) for name, value in known.env.items()}
        run_timeout, messages = self.seconds(sandbox_context, run_timeout), ""
        try:
            if known.compile:
                compile_timeout = compile_timeout or COMPILE.wall
                command = Command(
                    argv=("sh", "-c", filled(known.compile, spec)), env=env, files=given, cwd=folder,
                    wall_seconds=compile_timeout,
                )  # fmt: skip
                made = await sandbox_context.execute(command)
                messages, given = made.stdout + made.stderr, {}
                if made.status is not ExecutionStatus.SUCCESS:
                    made.stdout, made.stderr, made.metadata["phase"] = "", messages, "compile"
                    refused = self.of_command(made, compile_timeout, "Compilation")
                    return await self._lacking(sandbox_context, known, spec) or refused
            command = Command(argv=argv, env=env, files=given, cwd=folder, wall_seconds=run_timeout)
            done = await sandbox_context.execute(command, stdin)
        finally:
            await sandbox_context.execute_command(["rm", "-rf", folder])
        if done.exit_code == NOT_FOUND and (lacking := await self._lacking(sandbox_context, known, spec)):
            return lacking
        result = self.of_command(done, run_timeout)
        result.metadata |= {"phase": "run"} | ({"compiler": messages} if messages else {})
        return result

    async def _lacking(self, sandbox: Place, language: Language, spec: JobSpec) -> ToolResult | None:
        """In words, if it was not the program's fault."""
        there = await sandbox.execute_command(f"command -v {language.needs}")
        if there.status is ExecutionStatus.SUCCESS:
            return None
        return self.failure(
            f"There is no {language.needs} in this sandbox, which {spec.runs} needs: name an image that has it"
        )


def _beside(language: Language, spec: JobSpec) -> dict[str, bytes]:
    """The files of a job; one in the place of the program is the program."""
    main = filled(language.main, spec)
    return {path: content for path, content in files_of(spec).items() if path != main}


@lru_cache(maxsize=256)
def _habits(check: str) -> tuple[tuple[str, ...], bool]:
    """The modules that a check imports, and those that they are in; and whether it leaves their functions alone."""
    found: dict[str, None] = {}
    for several, one in _IMPORT.findall(check):
        for name in re.findall(r"[\w.]+", re.sub(r"\bas\s+\w+", "", several or one)):
            parts = name.split(".")
            found |= dict.fromkeys(".".join(parts[: length + 1]) for length in range(len(parts)))
    return tuple(found), not _PATCH.search(check) and {*found, "builtins"}.isdisjoint(_ASSIGNED.findall(check))
