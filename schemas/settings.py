"""Every knob, from the environment (`EVALPOOL_…`), the file that `EVALPOOL_ENV_FILE` names, or the checkout's `.env`,
in this order. A wrong value is refused by its name."""

import math
import os
import socket
from functools import lru_cache
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, quote, urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, DotEnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from schemas.errors import SetupError

PREFIX = "EVALPOOL_"
ENV_FILE = "EVALPOOL_ENV_FILE"
MACHINE_SOCKET = Path("/run/evalpool/redis/redis.sock")
"""The socket of the Redis that `deploy/setup` starts if root runs it."""
CHECKOUT = Path(__file__).absolute().parents[1]
"""The folder evalpool runs from. It is a checkout if it has our `pyproject.toml`, otherwise a folder of packages."""


def cgroup_cpus() -> int:
    """The CPUs this process may really use: its affinity, cut by its cgroup's quota."""
    cpus = len(os.sched_getaffinity(0))
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            words = Path(quota_file).read_text().split()
            if period_file:
                words += Path(period_file).read_text().split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # absent, or "max": no quota
            continue
        if quota > 0 and period > 0:
            cpus = min(cpus, math.ceil(quota / period))
    return max(1, cpus)


def _state_dir() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "evalpool"


def _env_files() -> list[Path]:
    """The files that settings are read from; the last one wins. The working directory is never searched: it may belong
    to somebody else, whose `.env` could name a database of their own."""
    files = [CHECKOUT / ".env"] if (CHECKOUT / "pyproject.toml").is_file() else []
    if named := os.environ.get(ENV_FILE):
        files.append(Path(named).expanduser())
        if not files[-1].is_file():
            raise SetupError(f"{ENV_FILE}={named!r}: there is no such file")
    return files


class Settings(BaseSettings):
    """One typed class for all of it."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, env_ignore_empty=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources of values; the first one that has a value wins."""
        try:
            return init_settings, env_settings, DotEnvSettingsSource(settings_cls, env_file=_env_files())
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"the file with the settings cannot be read: {error}") from None

    redis_url: str | None = Field(default=None, pattern=r"^(rediss?|unix)://")
    """The Redis that wakes workers. Unset: `evalpool run` starts a private server, all else uses `queue_url`."""
    database_url: str | None = Field(default=None, pattern=r"^(sqlite|postgresql(\+psycopg)?)://")
    """Where rows live. Unset: SQLite in the state directory."""
    state_dir: Path = Field(default_factory=_state_dir)
    """Where the default database and the logs of private workers lie."""
    slots: int = Field(default_factory=cgroup_cpus, ge=1, le=256)
    """Jobs one worker runs at a time. Default: the CPUs of its cgroup."""
    image: str = "evalpool/python:3.11"
    """The image of jobs that name none."""
    code_image: str = Field(default="evalpool/code:12", min_length=1)
    """The image of jobs that name none and are in another language than Python or bash."""
    notebook_image: str = Field(default="evalpool/notebook:3.11", min_length=1)
    """The image of notebooks that name none."""
    max_uses: int = Field(default=1000, ge=1)
    """Jobs a warm sandbox runs before it is replaced."""
    max_attempts: int = Field(default=3, ge=1)
    """How often a job is tried before our own failures end it as `sandbox_error`."""
    max_cpu_seconds: float | None = Field(default=None, gt=0)
    """The ceiling of a job's `limits.cpu_seconds`; the ones below are alike. Unset: `Limits` itself is the bound."""
    max_wall_seconds: float | None = Field(default=None, gt=0)
    max_memory_mib: int | None = Field(default=None, ge=1)
    max_processes: int | None = Field(default=None, ge=1)
    max_output_bytes: int | None = Field(default=None, ge=0)
    max_file_mib: int | None = Field(default=None, ge=0)
    max_disk_mib: int | None = Field(default=None, ge=1)
    lease_seconds: float = Field(default=15, ge=1)
    """How long a worker may be silent before its jobs go to another; renewed every second, or third of it."""
    grace_seconds: float = Field(default=30, ge=0)
    """How long a worker that is told to stop lets its running jobs go on; then they are put back."""
    reconcile_seconds: float = Field(default=3, ge=0.1)
    """How often a worker polls the database for jobs, and writes its heartbeat."""
    visibility_seconds: float = Field(default=30, ge=1)
    """Seconds after which a wake-up that a worker has not acknowledged is delivered again."""
    redis_timeout: float = Field(default=30, gt=0)
    """Seconds until a silent connection to Redis is given up."""
    chunk: int = Field(default=32, ge=1, le=1000)
    """How many jobs a worker claims at once, at most."""
    runtime: str | None = None
    """Another OCI runtime for sandboxes, such as gVisor's `runsc`; the engine must know it by this name."""
    preload: tuple[str, ...] = ()
    """Modules that the warm interpreter imports besides the usual ones of the standard library, as a JSON list;
    the image must have them."""
    interpreter: Literal["warm", "cold"] = "warm"
    """`warm`: Python jobs are forked from a running interpreter; `cold`: each starts its own."""
    docker_timeout: float = Field(default=60, gt=0)
    """Seconds until a call to the Docker engine is given up."""
    log_format: Literal["text", "json"] = "text"
    worker_name: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    """How this worker signs its leases and results."""

    @field_validator("state_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @property
    def queue_url(self) -> str:
        """The Redis that we talk to. If none is named, this is the Redis that `deploy/setup` started for this user or
        for this machine, provided that this user may use its socket; otherwise it is the usual port."""
        if self.redis_url is not None:
            return self.redis_url
        for place in (self.state_dir / "redis" / "redis.sock", MACHINE_SOCKET):
            if os.access(place, os.W_OK):
                return f"unix://{quote(str(place))}?db=0"
        return "redis://localhost:6379/0"

    @property
    def broker_url(self) -> str:
        """The URL of the same Redis for Celery, whose syntax for a socket differs from that of redis-py."""
        url = urlsplit(self.queue_url)
        if url.scheme != "unix":
            return self.queue_url
        given = {"db": "0"} | dict(parse_qsl(url.query))
        user, password = (quote(given.get(name, ""), safe="") for name in ("username", "password"))
        login = url.netloc.rpartition("@")[0] or (f"{user}:{password}" if user or password else "")
        return f"redis+socket://{login and login + '@'}{url.path}?virtual_host={given['db']}"

    @property
    def store_url(self) -> str:
        """The database that SQLAlchemy talks to."""
        url = self.database_url or f"sqlite:///{self.state_dir / 'evalpool.db'}"
        return url.replace("postgresql://", "postgresql+psycopg://", 1)


def settings() -> Settings:
    """The settings of this moment: the environment is read again when it has changed, and only then."""
    return _load(tuple(item for item in os.environ.items() if item[0].startswith(PREFIX)))


@lru_cache(maxsize=4)
def _load(_environment: tuple[tuple[str, str], ...]) -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = PREFIX + str(problem["loc"][0]).upper()
        raise SetupError(f"{name}={problem['input']!r}: {problem['msg']}") from None
