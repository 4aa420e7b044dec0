"""A tool of your own, which a model can call: `python examples/tool.py` tries it."""

import asyncio

from pydantic import BaseModel

from api.sandbox import DockerSandboxConfig, Sandbox, SandboxFactory, SandboxType, Tool, register_tool


@register_tool("word_count")
class WordCount(Tool):
    """Count the words of a text."""

    class Parameters(BaseModel):
        text: str

    async def execute(self, sandbox: Sandbox, text: str) -> str:
        counted = await sandbox.execute_command(["wc", "-w"], stdin=text)
        return counted.stdout.strip()


async def main() -> None:
    """Once."""
    config = DockerSandboxConfig(tools_config=["word_count"])
    async with SandboxFactory.create_sandbox(SandboxType.DOCKER, config) as sandbox:
        print(sandbox.get_available_tools()["word_count"]["function"])
        print((await sandbox.execute_tool("word_count", {"text": "to be or not to be"})).output)


if __name__ == "__main__":
    asyncio.run(main())
