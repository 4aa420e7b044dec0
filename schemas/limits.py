"""What a program may use."""

from pydantic import Field

from schemas.base import Given


class Limits(Given):
    """What one run of a program may use. CPU time decides; the wall clock only stands behind it."""

    cpu_seconds: float = Field(default=5, gt=0, le=3600, allow_inf_nan=False)
    """User and system time of all its processes together."""
    wall_seconds: float | None = Field(default=None, gt=0, le=86_400, allow_inf_nan=False)
    """Backstop for programs that wait instead of working; `None` means 4 × cpu + 2."""
    memory_mib: int = Field(default=512, ge=4, le=1 << 20)
    """Memory of all its processes together, the files it writes included."""
    processes: int = Field(default=64, ge=1, le=4096)
    """Processes and threads alive at once."""
    output_bytes: int = Field(default=1_048_576, ge=0, le=16 << 20)
    """Of each stream; one byte more is `output_limit`."""
    file_mib: int = Field(default=64, ge=0, le=1 << 16)
    """Largest single file."""
    disk_mib: int = Field(default=64, ge=1, le=1 << 16)
    """All files in the working directory together."""

    @property
    def wall(self) -> float:
        """The wall limit that applies, in seconds."""
        return 4 * self.cpu_seconds + 2 if self.wall_seconds is None else self.wall_seconds
