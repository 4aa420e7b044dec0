"""Programs in many languages, run through the library."""

from collections.abc import AsyncIterator

import docker
import pytest
from docker.errors import ImageNotFound

from evalpool.api.sandbox import ExecutionStatus, Sandbox, SandboxFactory, SandboxType
from evalpool.worker.tools.languages import LANGUAGES
from tests.conftest import missing


@pytest.fixture
async def sandbox(engine_client: docker.DockerClient) -> AsyncIterator[Sandbox]:
    try:
        engine_client.images.get("evalpool/code:12")
    except ImageNotFound:
        missing("no image evalpool/code:12 here")
    config = {"tools_config": ["multi_code_executor", "shell_executor"], "memory_limit": "1g"}
    async with SandboxFactory.create_sandbox(SandboxType.DOCKER, config) as sandbox:
        yield sandbox


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "print(open('data').read() + input())"),
        ("cpp", '#include <iostream>\n#include <fstream>\nint main() { std::string a, b; std::ifstream("data") >> a; '
                'std::cin >> b; std::cout << a + b << "\\n"; }'),
        ("nodejs", "const read = require('fs').readFileSync; console.log(read('data', 'utf8') + read(0, 'utf8'))"),
        ("java", "import java.nio.file.*; import java.util.*;\nclass Any { public static void main(String[] a) "
                 'throws Exception { String d = Files.readString(Path.of("data")); '
                 "System.out.println(d + new Scanner(System.in).next()); } }"),
        ("go", 'package main\nimport ("fmt"; "os")\nfunc main() { d, _ := os.ReadFile("data"); var s string; '
               "fmt.Scan(&s); fmt.Println(string(d) + s) }"),
        ("bash", "echo $(cat data)$(cat)"),
    ],
)  # fmt: skip
async def test_a_program_is_compiled_run_and_removed(sandbox: Sandbox, language: str, code: str) -> None:
    given = {"language": language, "code": code, "files": {"data": "4"}, "stdin": "2", "run_timeout": 60}
    result = await sandbox.execute_tool("multi_code_executor", given)
    assert (result.status, result.output, result.metadata["phase"]) == (ExecutionStatus.SUCCESS, "42\n", "run"), result
    assert (await sandbox.execute_command("ls -A")).stdout == ""


async def test_a_failed_build_shows_the_compilers_message(sandbox: Sandbox) -> None:
    broken = await sandbox.execute_tool("multi_code_executor", {"language": "c", "code": "int main( {"})
    assert (broken.status, broken.metadata["phase"]) == (ExecutionStatus.ERROR, "compile")
    assert "error: expected" in str(broken.error)
    slow = "int main() { for (;;); }"
    late = await sandbox.execute_tool("multi_code_executor", {"language": "c", "code": slow, "run_timeout": 0.5})
    assert (late.status, late.metadata["phase"]) == (ExecutionStatus.TIMEOUT, "run")
    unknown = await sandbox.execute_tool("multi_code_executor", {"language": "klingon", "code": "x"})
    assert str(unknown.error).startswith("Unsupported language: klingon; known: python, bash")
    outside = {"language": "c", "code": "", "files": {"../x": ""}}
    assert "Invalid input: files" in str((await sandbox.execute_tool("multi_code_executor", outside)).error)


async def test_compiler_warnings_are_not_the_output_of_a_program(sandbox: Sandbox) -> None:
    given = {"language": "pascal", "code": "begin writeln('hello') end."}
    result = await sandbox.execute_tool("multi_code_executor", given)
    assert result.output == "hello\n"
    assert "Free Pascal Compiler" in result.metadata["compiler"]
    late = {"language": "c", "code": '#include "/dev/zero"', "compile_timeout": 0.3}
    stopped = await sandbox.execute_tool("multi_code_executor", late)
    assert (stopped.status, stopped.metadata["phase"]) == (ExecutionStatus.TIMEOUT, "compile")


async def test_the_header_of_all_headers_is_ready_for_the_compiler(sandbox: Sandbox) -> None:
    await sandbox.put_file("main.cpp", "#include <bits/stdc++.h>\nint main() {}\n")
    command = LANGUAGES["cpp"].compile.replace("g++ -O2", "g++ -H -O2")
    made = await sandbox.execute_command(command)
    used = [line for line in made.stderr.splitlines() if line.startswith("! /usr/")]
    assert (made.exit_code, len(used)) == (0, 1), made.stderr


async def test_a_missing_compiler_is_named(engine_client: docker.DockerClient) -> None:
    config = {"tools_config": ["multi_code_executor"], "image": "evalpool/python:3.11"}
    async with SandboxFactory.create_sandbox(SandboxType.DOCKER, config) as sandbox:
        for language, needed in (("c", "gcc"), ("ruby", "ruby")):
            result = await sandbox.execute_tool("multi_code_executor", {"language": language, "code": ""})
            assert str(result.error).startswith(f"This sandbox has no {needed}, which {language} needs")
