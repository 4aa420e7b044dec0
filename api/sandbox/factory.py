"""Creates sandboxes by the names of their types."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from evalpool.api.sandbox.sandbox import Sandbox
from evalpool.schemas.errors import InvalidConfig
from evalpool.schemas.sandbox import DockerNotebookConfig, DockerSandboxConfig, SandboxConfig, SandboxType

T = TypeVar("T", bound=type[Sandbox])

CONFIGS: dict[str, type[SandboxConfig]] = {
    SandboxType.DOCKER: DockerSandboxConfig,
    SandboxType.DOCKER_NOTEBOOK: DockerNotebookConfig,
}


def register_sandbox(sandbox_type: str) -> Callable[[T], T]:
    """Register the decorated class as the sandbox of this type, which may be any name."""

    def register(sandbox: T) -> T:
        SandboxFactory.register_sandbox(sandbox_type, sandbox)
        return sandbox

    return register


class SandboxFactory:
    """Creates sandboxes. The caller starts them."""

    _types: ClassVar[dict[str, type[Sandbox]]] = {}

    @classmethod
    def register_sandbox(cls, sandbox_type: str, sandbox: type[Sandbox]) -> None:
        """Register a class for a type. A later registration replaces an earlier one."""
        if not isinstance(sandbox, type) or not issubclass(sandbox, Sandbox):
            raise TypeError(f"register_sandbox({sandbox_type!r}): {sandbox!r} is not a subclass of Sandbox")
        cls._types[str(sandbox_type)] = sandbox

    @classmethod
    def create_sandbox(
        cls, sandbox_type: str, config: SandboxConfig | dict[str, Any] | None = None, sandbox_id: str | None = None
    ) -> Sandbox:
        """Create a sandbox, which is not started yet. Raises `InvalidConfig` if the type is not registered."""
        if str(sandbox_type) not in cls._types:
            known = ", ".join(cls.get_available_types())
            raise InvalidConfig(f"Sandbox type {sandbox_type} is not registered; known: {known}")
        if not isinstance(config, SandboxConfig):
            config = _made(CONFIGS.get(sandbox_type, SandboxConfig), config or {})
        return cls._types[str(sandbox_type)](config, sandbox_id)

    @classmethod
    def get_available_types(cls) -> list[str]:
        """Return the names of the registered types."""
        return sorted(cls._types)


def _made(kind: type[SandboxConfig], fields: Any) -> SandboxConfig:
    if not isinstance(fields, Mapping):
        raise InvalidConfig(f"config: it must be a {kind.__name__} or a mapping of its fields, not {fields!r:.100}")
    return kind(**{str(name): value for name, value in fields.items()})
