"""The tool that reads and writes files in a sandbox's working folder, and nowhere else."""

import base64
import codecs
import re

from pydantic import Field

from evalpool.schemas.sandbox import ExecutionStatus, ToolResult
from evalpool.worker.sandbox.base import End
from evalpool.worker.tools.base import Place, Tool, ToolParameters
from evalpool.worker.tools.registry import register_tool

OPERATIONS = ("create", "read", "write", "delete", "list", "exists")
ENCODINGS = re.compile(
    r"ascii|utf-(8|8-sig|16|32|16-[bl]e|32-[bl]e)|iso8859-\d+|cp\d+|gb.*|big5.*|shift_jis.*|euc_.*|koi8.*|mac.*"
)
"""The encodings that are supported. Some others of Python take hours for a long text."""
ISOLATED = "import posix, sys; sys.path[:] = [p for p in sys.path if p not in ('', '/tmp', posix.getcwd())]\n"
"""The first line of our own scripts. It keeps files in the working folder from being imported as modules."""
INSIDE = '''
import os, stat, sys
operation, path = sys.argv[1:]
parts = [part for part in path.split("/") if part not in ("", ".")]

def folder(names, make):
    """Open a folder step by step and never through a link, so that no path can lead out."""
    fd = os.open("/" if path.startswith("/") else ".", os.O_RDONLY | os.O_DIRECTORY)
    for name in names:
        if make:
            try: os.mkdir(name, dir_fd=fd)
            except FileExistsError: pass
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
    return fd

def regular():
    fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder(parts[:-1], False))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError("it is not a regular file")
    return fd

def copy(source, target):
    while data := source.read(1 << 20):
        target.write(data)

try:
    if operation == "exists":
        try:
            if parts: os.stat(parts[-1], dir_fd=folder(parts[:-1], False), follow_symlinks=False)
            print("exists", end="")
        except OSError:
            print("does not exist", end="")
    elif operation == "list":
        os.fchdir(folder(parts, False))
        sys.stdout.flush()
        os.execvp("ls", ["ls", "-la"])
    elif not parts:
        raise OSError("it is the working folder itself")
    elif operation == "read":
        with open(regular(), "rb") as file:
            copy(file, sys.stdout.buffer)
    elif operation in ("create", "write"):  # first beside the old file: a failure changes nothing
        fd, mode, aside = folder(parts[:-1], True), 0o644, f".{os.urandom(8).hex()}"
        try:
            old = os.stat(parts[-1], dir_fd=fd, follow_symlinks=False).st_mode
            if not stat.S_ISREG(old):
                raise OSError(40 if stat.S_ISLNK(old) else 0, "it is not a regular file")
            mode = old & 0o777
        except FileNotFoundError:
            pass
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=fd), "wb") as file:
                copy(sys.stdin.buffer, file)
            os.rename(aside, parts[-1], src_dir_fd=fd, dst_dir_fd=fd)
        except OSError:
            try: os.unlink(aside, dir_fd=fd)
            except FileNotFoundError: pass
            raise
    elif operation == "delete":
        try:
            fd = folder(parts[:-1], False)
            if stat.S_ISDIR(os.stat(parts[-1], dir_fd=fd, follow_symlinks=False).st_mode):
                import shutil  # which takes longer than all the rest
                shutil.rmtree(parts[-1], dir_fd=fd)
            else:
                os.unlink(parts[-1], dir_fd=fd)
        except FileNotFoundError:
            pass
except OSError as error:
    links = {40: "a link is in the way, and links are not followed", 20: "a part of it is a link or not a folder"}
    sys.exit(f"{path}: {links.get(error.errno) or error.strerror or error}")
'''
"""Runs inside, as the sandbox's own user, and so has no more rights than any program there."""


@register_tool("file_operation")
class FileOperation(Tool):
    """Works on files in the working folder."""

    description = "Create, read, write, delete or list files in the working folder, or ask whether one exists."

    class Parameters(ToolParameters):
        operation: str = Field(
            description="What to do",
            json_schema_extra={"enum": [*OPERATIONS]},
        )
        file_path: str = Field(description="A path in the working folder, absolute or relative to it", max_length=4096)
        content: str | None = Field(default=None, description="The text to write")
        encoding: str = Field(
            default="utf-8", description="How text becomes bytes; base64 for any bytes", max_length=100
        )

    async def execute(
        self,
        sandbox_context: Place,
        operation: str,
        file_path: str,
        content: str | None = None,
        encoding: str = "utf-8",
    ) -> ToolResult:
        home, binary = sandbox_context.config.working_dir, encoding == "base64"
        path = confined(file_path, home)
        if problem := _problem(operation, file_path, content):
            return self.failure(problem)
        if path is None:
            return self.failure(f"Path is outside of {home}: {file_path}")
        try:
            data = _bytes(content or "", encoding)
        except (LookupError, ValueError) as error:
            return self.failure(f"encoding: {error}")
        result = await sandbox_context.execute_python(
            ISOLATED + INSIDE, self.options.timeout, args=(operation, path), stdin=data,
            encoding="utf-8" if operation != "read" else "latin-1" if binary else encoding,
        )  # fmt: skip
        if result.status is not ExecutionStatus.SUCCESS:
            why = result.stderr.strip() or f"the script ended with {result.status}"
            if result.metadata.get("ended") == End.OUTPUT:
                why = f"{path} is larger than the output of a tool may be; `get_file` returns all of it"
            return self.failure(f"{operation} failed: {why}", status=result.status)
        if binary and operation == "read":
            return self.result(base64.b64encode(result.stdout.encode("latin-1")).decode())
        written, deleted = f"File written successfully: {file_path}", f"Successfully deleted: {file_path}"
        return self.result({"create": written, "write": written, "delete": deleted}.get(operation, result.stdout))


def _problem(operation: str, file_path: str, content: str | None) -> str:
    """Return what is wrong with the parameters, or nothing."""
    if operation not in OPERATIONS:
        return f"Unknown operation: {operation}; known: {', '.join(OPERATIONS)}"
    if not file_path.strip():
        return "No file path provided"
    if operation == "write" and content is None:
        return "Content is required for write operation"
    return ""


def _bytes(content: str, encoding: str) -> bytes:
    """Return the bytes of a text. Raises `LookupError` or `ValueError` if the encoding is not allowed or does not
    fit."""
    if encoding == "base64":
        return base64.b64decode(content, validate=True)
    if not ENCODINGS.fullmatch(codecs.lookup(encoding).name):
        raise LookupError(f"{encoding} is not supported; utf-8, utf-16, latin-1 and similar encodings are")
    return content.encode(encoding)


def confined(path: str, home: str) -> str | None:
    """Return a path relative to the working folder, or `None` if it leads out of it. Links are checked inside."""
    if "\0" in path:
        return None
    parts: list[str] = []
    for part in (path if path.startswith("/") else f"{home}/{path}").split("/"):
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    start = home.strip("/").split("/")
    return "/".join(parts[len(start) :]) or "." if parts[: len(start)] == start else None
