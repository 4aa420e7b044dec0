"""The limits of a program."""

from pydantic import Field

from evalpool.schemas.base import Given


class Limits(Given):
    """What one run of a program may use. The CPU limit decides if it was too slow; the wall limit is a backstop."""

    cpu_seconds: float = Field(default=5, gt=0, le=3600, allow_inf_nan=False)
    """User and system time of all processes together."""
    wall_seconds: float | None = Field(default=None, gt=0, le=86_400, allow_inf_nan=False)
    """Backstop for programs that wait instead of working; `None` means 4 × cpu_seconds + 2."""
    memory_mib: int = Field(default=512, ge=4, le=1 << 20)
    """Memory of all processes together, including the files that they write."""
    processes: int = Field(default=64, ge=1, le=4096)
    """Processes and threads that are alive at the same time."""
    output_bytes: int = Field(default=1_048_576, ge=0, le=16 << 20)
    """Bytes of each output stream; one byte more is `output_limit`."""
    file_mib: int = Field(default=64, ge=0, le=1 << 16)
    """Size of the largest file."""
    disk_mib: int = Field(default=64, ge=1, le=1 << 16)
    """Size of all files in the working directory together."""

    @property
    def wall(self) -> float:
        """The wall limit that applies, in seconds."""
        return 4 * self.cpu_seconds + 2 if self.wall_seconds is None else self.wall_seconds
