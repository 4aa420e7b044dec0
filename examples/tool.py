"""Defines a tool that a model can call, and calls it once: `python examples/tool.py`."""

import asyncio

from pydantic import BaseModel

from evalpool.sandbox import DockerSandboxConfig, Sandbox, SandboxFactory, SandboxType, Tool, register_tool


@register_tool("word_count")
class WordCount(Tool):
    """Count the words of a text."""

    class Parameters(BaseModel):
        text: str

    async def execute(self, sandbox: Sandbox, text: str) -> str:
        counted = await sandbox.execute_command(["wc", "-w"], stdin=text)
        return counted.stdout.strip()


async def main() -> None:
    """Call the tool once, in a sandbox of its own."""
    config = DockerSandboxConfig(tools_config=["word_count"])
    async with SandboxFactory.create_sandbox(SandboxType.DOCKER, config) as sandbox:
        print(sandbox.get_available_tools()["word_count"]["function"])
        print((await sandbox.execute_tool("word_count", {"text": "to be or not to be"})).output)


if __name__ == "__main__":
    asyncio.run(main())
