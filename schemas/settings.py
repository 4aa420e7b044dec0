"""All settings of evalpool. They come from the environment (`EVALPOOL_…`), the file that `EVALPOOL_ENV_FILE` names, or
the checkout's `.env`, in this order. A wrong value is rejected with the name of the setting."""

import json
import math
import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, quote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from evalpool.schemas.base import nearest, sentence
from evalpool.schemas.errors import SetupError
from evalpool.schemas.job import image_name

PREFIX = "EVALPOOL_"
ENV_FILE = "EVALPOOL_ENV_FILE"
RESERVED = ("SESSIONS",)
"""Settings of later versions, which are accepted so that one environment can serve both."""
KUBERNETES = re.compile(
    r"EVALPOOL_(\w+_)?(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=.*|PORT=\w+://.*|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=.*)"
)
"""Variables that Kubernetes sets in every container if a service has a name that begins with evalpool. A port that is
only a number is no such variable, but somebody's mistake."""
MACHINE_SOCKET = Path("/run/evalpool/redis/redis.sock")
"""The socket of the Redis that `deploy/setup` starts if root runs it."""
_LOGIN = re.compile(r"://[^/]*@")
CHECKOUT = Path(__file__).resolve().parents[1]
"""The folder evalpool runs from. It is a checkout if it has our `pyproject.toml`, otherwise a folder of packages."""


def cgroup_cpus() -> int:
    """How many CPUs this process may use, according to its affinity and the quota of its cgroup."""
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
            raise SetupError(f"{ENV_FILE}={named!r}: there is no such file; create it, or unset {ENV_FILE}")
    return files


def _redis(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix") or "://" not in url:
        raise ValueError("it must begin with redis://, rediss:// or unix://, for example redis://localhost:6379/0")
    _port(url)
    number = parts.path.strip("/")
    if parts.scheme != "unix" and number and not number.isdecimal():
        raise ValueError(f"its database {number!r} is not a number; write redis://host:6379/0")
    return url


def _database(url: str) -> str:
    if not url.startswith(("sqlite://", "postgresql://", "postgresql+psycopg://")):
        raise ValueError("it must begin with sqlite:///, postgresql:// or postgresql+psycopg://")
    if url.startswith("sqlite://"):
        path = url.removeprefix("sqlite:///").partition("?")[0]
        if not url.startswith("sqlite:///") or path in ("", ":memory:"):
            raise ValueError("evalpool needs a file that several processes can open; write sqlite:////path/to/file")
    else:
        _port(url)
    return url


def _port(url: str) -> None:
    try:
        _ = urlsplit(url).port
    except ValueError:
        raise ValueError("its port is not a number between 0 and 65535") from None


def _words(given: Any) -> Any:
    """Parse a list from the environment, whose items are separated by commas or written as JSON."""
    if not isinstance(given, str):
        return given
    if not given.lstrip().startswith("["):
        return [word.strip() for word in given.split(",") if word.strip()]
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError("it must be a list of names, separated by commas or as JSON")
    return found


def _modules(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name!r} is not a module name; separate several names with commas")
    return names


ImageName = Annotated[str, AfterValidator(image_name)]


class Settings(BaseSettings):
    """All settings, each with its default and its bounds."""

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
        """The sources of values. The first source that has a value wins."""
        files = _env_files()
        try:
            named = DotEnvSettingsSource(settings_cls, env_file=files)
            given = [name for name, value in os.environ.items() if not KUBERNETES.fullmatch(f"{name}={value}")]
            _refuse_unknown(given, "")
            for file in files:
                found = DotEnvSettingsSource(settings_cls, env_file=file).env_vars
                _refuse_unknown(map(str.upper, found), f" in {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"the settings cannot be read: {error}; correct the file, or {ENV_FILE}") from None
        return init_settings, env_settings, named

    redis_url: Annotated[str, AfterValidator(_redis)] | None = None
    """The Redis that wakes workers. Unset: `evalpool run` starts a private server, and everything else uses
    `queue_url`."""
    database_url: Annotated[str, AfterValidator(_database)] | None = None
    """The database of jobs and results. Unset: SQLite in the state directory."""
    state_dir: Path = Field(default_factory=_state_dir)
    """The folder of the default database and of the logs of private workers."""
    slots: int = Field(default_factory=cgroup_cpus, ge=1, le=256)
    """How many jobs one worker runs at a time. Default: the CPUs of its cgroup."""
    image: ImageName = "evalpool/python:3.11"
    """The image of Python and bash jobs that name none."""
    code_image: ImageName = "evalpool/code:12"
    """The image of jobs in other languages than Python and bash that name none."""
    notebook_image: ImageName = "evalpool/notebook:3.11"
    """The image of notebooks that name none."""
    max_uses: int = Field(default=1000, ge=1)
    """How many jobs a warm sandbox runs before it is replaced."""
    idle: int | None = Field(default=None, ge=1, le=4096)
    """How many sandboxes a worker keeps beyond its slots, at most, so that jobs with other images find a warm one.
    Unset: four for each slot, or fewer if they would need more than an eighth of the machine's free memory."""
    max_attempts: int = Field(default=3, ge=1)
    """How often a job is tried before failures of evalpool end it as `sandbox_error`."""
    max_cpu_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The ceiling of a job's `limits.cpu_seconds`; the next six settings are the ceilings of the other limits. Unset:
    the bounds of `Limits` apply."""
    max_wall_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_memory_mib: int | None = Field(default=None, ge=1)
    max_processes: int | None = Field(default=None, ge=1)
    max_output_bytes: int | None = Field(default=None, ge=0)
    max_file_mib: int | None = Field(default=None, ge=0)
    max_disk_mib: int | None = Field(default=None, ge=1)
    lease_seconds: float = Field(default=15, ge=1, allow_inf_nan=False)
    """After how long, at most, the jobs of a silent worker go to another worker. A worker renews a lease when a third
    of this period is over, so that two thirds are always left, less a second."""
    grace_seconds: float = Field(default=30, ge=0, allow_inf_nan=False)
    """How long a worker that is told to stop lets its jobs run on before it puts them back into the queue."""
    reconcile_seconds: float = Field(default=3, ge=0.1, allow_inf_nan=False)
    """Seconds between two polls of the database by a worker."""
    visibility_seconds: float = Field(default=30, ge=1, allow_inf_nan=False)
    """Seconds after which a wake-up that a worker has not acknowledged is delivered again."""
    redis_timeout: float = Field(default=30, gt=0, allow_inf_nan=False)
    """Seconds until a connection to Redis that does not answer is given up."""
    chunk: int = Field(default=32, ge=1, le=1000)
    """How many jobs a worker claims at once, at most."""
    runtime: str | None = None
    """Another OCI runtime for sandboxes, for example gVisor's `runsc`. The Docker engine must know it by this name."""
    preload: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words), AfterValidator(_modules)] = ()
    """Modules that the warm interpreter imports besides those of the standard library, separated by commas. Modules
    that an image lacks are not imported there."""
    warm_imports: bool = True
    """Whether sandboxes are kept whose interpreter has imported slow libraries, such as pandas, that jobs import."""
    interpreter: Literal["warm", "cold"] = "warm"
    """`warm`: Python jobs are forked from a running interpreter; `cold`: each job starts an interpreter."""
    docker_timeout: float = Field(default=60, gt=0, allow_inf_nan=False)
    """Seconds until a call to the Docker engine is given up."""
    log_format: Literal["text", "json"] = "text"
    worker_name: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    """The name of this worker in its leases and results."""
    fleet: str | None = Field(default=None, min_length=1, max_length=100)
    """Jobs that are submitted with this fleet name are claimed only by workers with the same fleet name. `evalpool run`
    sets it for itself and its private worker."""

    @field_validator("state_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @property
    def queue_url(self) -> str:
        """The URL of Redis. If `redis_url` is unset, this is the Redis that `deploy/setup` started for this user or for
        this machine, provided that this user may use its socket, and otherwise the usual port."""
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
        """The URL of the database for SQLAlchemy."""
        url = self.database_url or f"sqlite:///{self.state_dir / 'evalpool.db'}"
        return url.replace("postgresql://", "postgresql+psycopg://", 1)


_chosen: ContextVar[Settings | None] = ContextVar("settings", default=None)


@contextmanager
def using(chosen: Settings) -> Iterator[None]:
    """Make `settings()` return these settings within the block, in this thread and in coroutines that it starts."""
    token = _chosen.set(chosen)
    try:
        yield
    finally:
        _chosen.reset(token)


def settings() -> Settings:
    """Return the settings that `using` has chosen, otherwise those of the environment, which is read again only if it
    has changed. Raises `SetupError`."""
    return _chosen.get() or _of_environment()


_latest: tuple[object, Settings] | None = None
"""The environment as it was when it was last read, and its settings."""


def _of_environment() -> Settings:
    global _latest
    # This is asked several times for each job. Comparing the dictionary inside takes a microsecond, and decoding all
    # variables takes thirty.
    now = getattr(os.environ, "_data", None)
    latest = _latest
    if latest is not None and now is not None and now == latest[0]:
        return latest[1]
    seen = dict(now or ())  # before it is read: another thread may change it meanwhile
    found = _load(tuple(item for item in os.environ.items() if item[0].upper().startswith(PREFIX)))
    _latest = seen, found
    return found


@lru_cache(maxsize=4)
def _load(_environment: tuple[tuple[str, str], ...]) -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = PREFIX + str(problem["loc"][0]).upper()
        given = _LOGIN.sub("://…@", str(problem["input"]))  # a password must not end up in a log
        raise SetupError(f"{name}={given!r}: {sentence(problem)}") from None


def _refuse_unknown(names: Iterable[str], place: str) -> None:
    """Raise `SetupError` for the first name that is not a setting: a misspelt one would have no effect, unnoticed."""
    known = [*(field.upper() for field in Settings.model_fields), ENV_FILE.removeprefix(PREFIX), *RESERVED]
    for name in names:
        if name.upper().startswith(PREFIX) and (own := name.upper().removeprefix(PREFIX)) not in known:
            meant = nearest(own, known)
            hint = f"did you mean {PREFIX}{meant}?" if meant else "docs/configuration.md lists them"
            raise SetupError(f"{name}{place} is not a setting of evalpool; {hint}")
