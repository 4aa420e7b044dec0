"""The tools that compile and run the text of a program."""

import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from evalpool.schemas.base import must_be
from evalpool.schemas.errors import InvalidJob
from evalpool.schemas.job import Case, JobSpec
from evalpool.schemas.limits import Limits
from evalpool.schemas.sandbox import ExecutionStatus, ToolResult
from evalpool.worker.sandbox.base import Command, Program
from evalpool.worker.tools.base import JobTool, Place, Seconds, ToolOptions, ToolParameters, files_of
from evalpool.worker.tools.guard import habits
from evalpool.worker.tools.languages import (
    BINARY,
    COMPILE,
    LANGUAGES,
    PACK,
    PACKED,
    UNPACK,
    binary,
    filled,
    lacks,
    unpacked,
)
from evalpool.worker.tools.notebook import Kernel
from evalpool.worker.tools.registry import register_tool

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
"""Appended to a program whose function is called. It reads the arguments as a JSON list and writes the value as JSON.
JSON turns numbers that are keys of a dictionary into strings; APPS, whose comparator is `json:unwrap`, wants numbers. A
program that tampers with this code can only forge its own answer, since the expected answer is not here."""

NOT_FOUND = 127
"""The exit code of a shell that does not find a program."""


class Steps(NamedTuple):
    """How one program is compiled and run: the commands of its language, with what the program itself decides."""

    main: str
    """The file for the program."""
    compile: str
    """The shell command that compiles the file; empty if nothing is compiled."""
    run: tuple[str, ...]
    """The command that runs the program; empty for the warm Python interpreter."""
    env: dict[str, str]
    files: dict[str, bytes]
    """The other files of the job. A file in the place of the program is left out, as the program goes there."""


def steps(spec: JobSpec) -> Steps:
    """Return how the program of a job is compiled and run."""
    language = LANGUAGES[spec.runs]
    main = filled(language.main, spec)
    files = {path: content for path, content in files_of(spec).items() if path != main}
    return Steps(
        main, filled(language.compile, spec), tuple(filled(word, spec) for word in language.run), language.env, files
    )


class TextTool(JobTool):
    """A tool for jobs whose code is the text of a program."""

    def program(self, spec: JobSpec, case: Case | None, compiled: bytes | None = None) -> Program:
        todo, given = steps(spec), spec if case is None else case
        check = spec.check or ""
        code = spec.code
        if spec.entry_point and case is not None:
            code += CALL % (case.comparator == "json:unwrap", spec.entry_point, spec.entry_point)
        needs = habits(check)
        text, main, run, alone, limits = code.encode(), todo.main, todo.run, None, spec.limits
        if compiled is not None:
            alone = binary(compiled) if run[0] == f"./{BINARY}" else None
            text, main, run = (compiled, PACKED, (*UNPACK, *run)) if alone is None else (alone, BINARY, run)
            # the program itself is not one of the files that it may write
            limits = limits.model_copy(update={"file_mib": max(limits.file_mib, (unpacked(compiled) >> 20) + 1)})
        return Program(
            code=text,
            main=main,
            argv=run,
            executable=alone is not None,
            args=given.args,
            stdin=given.stdin.encode(),
            env=todo.env | spec.env,
            files=todo.files,
            check=None if spec.check is None else check.encode(),
            tools=needs.names,
            guarded=needs.guarded,
            subject=spec.entry_point,
            limits=limits,
        )

    def programs(self, spec: JobSpec, compiled: bytes | None = None) -> Iterator[Program]:
        """Yield the program for each case. Their code and files are the same objects, as far as they are equal."""
        made: dict[bool, Program] = {}
        last = len(spec.cases) - 1
        for index, case in enumerate(spec.cases or (None,)):
            odd = case is not None and case.comparator == "json:unwrap"  # then the function is called in another way
            if case is None or odd not in made:
                made[odd] = self.program(spec, case, compiled)
            given = spec if case is None else case
            yield replace(made[odd], args=given.args, stdin=given.stdin.encode(), more=index < last)

    def compiler(self, spec: JobSpec) -> Program | None:
        if not LANGUAGES[spec.runs].compile:
            return None
        todo, limits, least = steps(spec), spec.limits, COMPILE
        roomy = {name: max(getattr(limits, name), getattr(least, name)) for name in ("memory_mib", "processes")}
        # all files are kept in memory; in steps, since the disk decides over the kind of sandbox
        roomy |= dict.fromkeys(("disk_mib", "file_mib"), (1 << (roomy["memory_mib"] - 1).bit_length()) * 3 // 4)
        return Program(
            code=spec.code.encode(),
            main=todo.main,
            argv=("sh", "-c", PACK % todo.compile),
            env=todo.env,
            files=todo.files,
            limits=least.model_copy(update=roomy),
        )

    def syntax(self, spec: JobSpec) -> Program | None:
        check = LANGUAGES[spec.runs].syntax
        if not check:
            return None
        todo = steps(spec)
        return Program(
            code=spec.code.encode(),
            main=todo.main,
            argv=("sh", "-c", f"{{ {check}; }} >&2"),
            # code that runs while the program is compiled, like Perl's BEGIN blocks, gets the same input as in a run
            stdin=(spec.cases[0] if spec.cases else spec).stdin.encode(),
            env=todo.env | spec.env,
            files=todo.files,
            limits=spec.limits,
        )


@register_tool("python_executor")
class PythonExecutor(TextTool):
    """Runs Python programs."""

    description = "Execute a Python program. Each call starts clean, unless it is asked to share its state with others."

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
    """Runs shell commands."""

    description = "Execute a shell command: a line for bash, or a program with its arguments."

    class Parameters(ToolParameters):
        command: Annotated[str | list[str], must_be("a line, or a list of a program and its arguments")] = Field(
            description="A line for bash, or a list of a program and its arguments"
        )
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
    """Runs programs in many languages."""

    description = "Execute a program in one of many languages. It is compiled first if its language needs that."

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
        todo, folder = steps(spec), f".code-{secrets.token_hex(4)}"
        given = todo.files | {todo.main: code.encode()}
        here = f"{sandbox_context.config.working_dir}/{folder}"
        env = {name: value.replace("/box", here) for name, value in todo.env.items()}
        run_timeout, messages = self.seconds(sandbox_context, run_timeout), ""
        try:
            if todo.compile:
                seconds = compile_timeout or COMPILE.wall
                compiler = ("sh", "-c", todo.compile)
                command = Command(argv=compiler, env=env, files=given, cwd=folder, wall_seconds=seconds)
                made = await sandbox_context.execute(command)
                messages, given = made.stdout + made.stderr, {}
                if made.status is not ExecutionStatus.SUCCESS:
                    made.stdout, made.stderr, made.metadata["phase"] = "", messages, "compile"
                    refused = self.of_command(made, seconds, "Compilation")
                    return await self._lacking(sandbox_context, spec) or refused
            argv = todo.run or ("python3", todo.main)
            command = Command(argv=argv, env=env, files=given, cwd=folder, wall_seconds=run_timeout)
            done = await sandbox_context.execute(command, stdin)
        finally:
            await sandbox_context.execute_command(["rm", "-rf", folder])
        if done.exit_code == NOT_FOUND and (lacking := await self._lacking(sandbox_context, spec)):
            return lacking
        result = self.of_command(done, run_timeout)
        result.metadata |= {"phase": "run"} | ({"compiler": messages} if messages else {})
        return result

    async def _lacking(self, sandbox: Place, spec: JobSpec) -> ToolResult | None:
        """Return a failure if the sandbox lacks what the language needs, as this is not the program's fault."""
        found = await sandbox.execute_command(f"command -v {LANGUAGES[spec.runs].needs}")
        if found.status is ExecutionStatus.SUCCESS:
            return None
        return self.failure(f"This sandbox {lacks(spec)}: choose an image that has it")
