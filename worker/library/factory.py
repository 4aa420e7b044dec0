"""The types of sandboxes by name."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from schemas.sandbox import DockerNotebookConfig, DockerSandboxConfig, SandboxConfig, SandboxType
from worker.library.sandbox import Sandbox

T = TypeVar("T", bound=type[Sandbox])

CONFIGS: dict[str, type[SandboxConfig]] = {
    SandboxType.DOCKER: DockerSandboxConfig,
    SandboxType.DOCKER_NOTEBOOK: DockerNotebookConfig,
}


def register_sandbox(sandbox_type: str) -> Callable[[T], T]:
    """Make a class known as the sandbox of this type, which may be any name."""

    def register(sandbox: T) -> T:
        SandboxFactory.register_sandbox(sandbox_type, sandbox)
        return sandbox

    return register


class SandboxFactory:
    """Makes sandboxes; each is started by whoever asked for it."""

    _types: ClassVar[dict[str, type[Sandbox]]] = {}

    @classmethod
    def register_sandbox(cls, sandbox_type: str, sandbox: type[Sandbox]) -> None:
        """Make it known; a later one takes the place of an earlier one."""
        if not isinstance(sandbox, type) or not issubclass(sandbox, Sandbox):
            raise TypeError(f"register_sandbox({sandbox_type!r}): {sandbox!r} is no subclass of Sandbox")
        cls._types[str(sandbox_type)] = sandbox

    @classmethod
    def create_sandbox(
        cls, sandbox_type: str, config: SandboxConfig | dict[str, Any] | None = None, sandbox_id: str | None = None
    ) -> Sandbox:
        """A sandbox that is not started yet."""
        if str(sandbox_type) not in cls._types:
            known = ", ".join(cls.get_available_types())
            raise ValueError(f"Sandbox type {sandbox_type} is not registered; known: {known}")
        if not isinstance(config, SandboxConfig):
            config = CONFIGS.get(sandbox_type, SandboxConfig).model_validate(config or {})
        return cls._types[str(sandbox_type)](config, sandbox_id)

    @classmethod
    def get_available_types(cls) -> list[str]:
        """Their names."""
        return sorted(cls._types)
