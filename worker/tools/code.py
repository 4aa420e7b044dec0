"""The tools that run a program's text: Python in the warm interpreter, shell scripts by bash."""

import base64
from dataclasses import dataclass

from schemas.job import Case, JobSpec
from worker.sandbox.base import Program
from worker.tools.base import Tool


@dataclass(frozen=True)
class Language:
    """How the programs of a language are run."""

    main: str
    """The file the program is put in."""
    argv: tuple[str, ...] = ()
    """The command that runs it; empty: the warm Python interpreter."""


LANGUAGES = {"python": Language("main.py"), "bash": Language("main.sh", ("bash", "main.sh"))}


class MultiCodeExecutor(Tool):
    """Runs a program of any language in the table."""

    name = "multi_code_executor"

    def program(self, spec: JobSpec, case: Case | None) -> Program:
        language = LANGUAGES[spec.runs]
        given = spec if case is None else case
        return Program(
            code=spec.code.encode(),
            main=language.main,
            argv=language.argv,
            args=given.args,
            stdin=given.stdin.encode(),
            env=spec.env,
            files={path: _bytes(content) for path, content in spec.files.items()},
            check=None if spec.check is None else spec.check.encode(),
            limits=spec.limits,
        )


class PythonExecutor(MultiCodeExecutor):
    """Runs Python in an interpreter forked from a warm one."""

    name = "python_executor"


class ShellExecutor(MultiCodeExecutor):
    """Runs a bash script."""

    name = "shell_executor"


def _bytes(content: str) -> bytes:
    return base64.b64decode(content[7:]) if content.startswith("base64:") else content.encode()
