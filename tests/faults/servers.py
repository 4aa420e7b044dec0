"""Private servers that tests can kill, stop and restart: Redis, PostgreSQL and a second Docker engine."""

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psycopg
import redis
from psycopg import sql
from redis.backoff import NoBackoff
from redis.retry import Retry

PATIENCE = 60.0
PR_SET_PDEATHSIG = 1


class Missing(Exception):  # noqa: N818 - a fact about this machine
    """A program that a test needs is not installed."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def dying_with_us() -> Callable[[], None]:
    """Return a function that the child calls before its exec: it makes the kernel kill the child when its parent
    dies."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return ask


def own_place(prefix: str) -> Path:
    """Make a directory in /tmp with our pid in its name. Directories of dead processes are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}-*-*"):
        pid = left.name.split("-")[-2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove_place(left)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-"))


def remove_place(place: Path) -> None:
    """Remove a directory with everything that is mounted below it."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in sorted((each for each in mounts if each.startswith(f"{place}/")), reverse=True):
        subprocess.run(["umount", "-l", mount], capture_output=True)
    shutil.rmtree(place, ignore_errors=True)


def wait_for(what: str, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until a condition holds. An error of a server that is not up yet means that it does not hold."""
    end = time.monotonic() + seconds
    while True:
        with suppress(redis.RedisError, psycopg.Error, OSError):
            if condition():
                return
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)


class RedisServer:
    """A Redis with an append-only file, whose port stays the same over restarts."""

    def __init__(self, place: Path, host: str = "127.0.0.1") -> None:
        self._binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if self._binary is None:
            raise Missing("no redis-server or valkey-server here")
        self._place = place
        self.host, self.port = host, free_port(host)
        self.url = f"redis://{host}:{self.port}/0"
        self.client = redis.Redis.from_url(self.url, socket_timeout=10, retry=Retry(NoBackoff(), 1))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, empty: bool = False) -> "RedisServer":
        """Start the server, with its file or, as after the loss of its disk, without it."""
        assert self._binary is not None
        if empty:
            shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(parents=True, exist_ok=True)
        command = [
            self._binary, "--port", str(self.port), "--bind", self.host, "--protected-mode", "no", "--save", "",
            "--appendonly", "yes", "--appendfsync", "everysec", "--dir", str(self._place),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, start_new_session=True, preexec_fn=dying_with_us()
        )
        wait_for("redis", self.client.ping)
        return self

    def kill(self) -> None:
        """Kill the server, as a power cut would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        self.client.connection_pool.disconnect()

    def waiting(self) -> int:
        """Return how many messages are in the three queues."""
        return sum(int(self.client.llen(f"evalpool.{each}")) for each in ("high", "normal", "low"))  # type: ignore[arg-type]

    def unacked(self) -> int:
        """Return how many messages were fetched and not acknowledged, by living or dead workers."""
        return int(self.client.hlen("unacked"))  # type: ignore[arg-type]


class PostgresServer:
    """A PostgreSQL from the distribution's packages, which trusts everybody and does not sync to disk."""

    def __init__(self, listen: str = "127.0.0.1") -> None:
        versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: path.parts[4].zfill(4))
        if not versions:
            raise Missing("no PostgreSQL server here: apt-get install postgresql")
        self._bin = versions[-1].parent
        self._user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
        self.place = own_place("evalpool-pg")
        shutil.chown(self.place, self._user)
        self._data = self.place / "data"
        self._listen, self.port = listen, free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", str(self._data), "-U", "evalpool", "-A", "trust", "-E", "UTF8", "--no-sync")

    def start(self, **settings: str) -> "PostgresServer":
        """Start the server with its data, and with these settings."""
        options = {
            "listen_addresses": self._listen, "port": self.port, "unix_socket_directories": self.place,
            "fsync": "off", "full_page_writes": "off", "max_connections": 60,  # safe but for a crash of the machine
            "log_min_messages": "fatal", "wal_level": "minimal", "max_wal_senders": 0, "shared_buffers": "32MB",
        }  # fmt: skip
        words = [word for name, value in (options | settings).items() for word in ("-c", f"{name}={value}")]
        with (self.place / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(self._bin / "postgres"), "-D", str(self._data), *words],
                stdout=log, stderr=log, cwd=self.place, start_new_session=True, preexec_fn=dying_with_us(),
                **self._as_user(),
            )  # fmt: skip
        wait_for("postgres", lambda: self.execute("SELECT 1"))
        return self

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Stop the server: with SIGQUIT at once, as in a crash that the next start recovers; with SIGINT by ending
        every session."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(PATIENCE)
            self.process = None

    def close(self) -> None:
        """Stop the server and remove its data."""
        self.stop()
        remove_place(self.place)

    def execute(self, command: str) -> list[tuple[object, ...]]:
        """Run a statement as the administrator, and return its output."""
        with psycopg.connect(self.url("postgres"), autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(sql.SQL(command))  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def url(self, database: str, host: str = "127.0.0.1") -> str:
        """Return the URL of one of its databases."""
        return f"postgresql://evalpool@{host}:{self.port}/{database}"

    def trust(self, network: str) -> None:
        """Let the hosts of a network connect. This must be called before the start."""
        with (self._data / "pg_hba.conf").open("a") as rules:
            rules.write(f"\nhost all all {network} trust\n")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._bin / program), *arguments]
        done = subprocess.run(command, cwd=self.place, capture_output=True, text=True, **self._as_user())
        assert done.returncode == 0, done.stderr

    def _as_user(self) -> dict[str, object]:
        if os.getuid():
            return {}
        account = pwd.getpwnam(self._user)
        return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


class Dockerd:
    """A second, independent Docker engine with the sandbox image. Its data are in a small tmpfs."""

    DATA_MIB = 400

    def __init__(self, image: str) -> None:
        binary = shutil.which("dockerd")
        if binary is None or os.getuid():
            raise Missing("no second Docker engine can be started here: that needs dockerd and root")
        self._binary = binary
        self.place = own_place("evf")  # a short name: there are socket files below
        self.data = self.place / "data"
        self.data.mkdir()
        self.log = self.place / "log"
        self.socket = self.place / "docker.sock"
        self.host = f"unix://{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None
        (self.place / "daemon.json").write_text("{}")
        mount = ["mount", "-t", "tmpfs", "-o", f"size={self.DATA_MIB}m", "tmpfs", str(self.data)]
        if subprocess.run(mount, capture_output=True).returncode:
            shutil.rmtree(self.place)
            raise Missing("no tmpfs can be mounted here")
        try:
            self.start()
            with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saved:
                subprocess.run(["docker", "-H", self.host, "load"], stdin=saved.stdout, check=True, capture_output=True)
            assert saved.returncode == 0
            self.docker("tag", image, "evalpool/kept:1")  # so that the image can lose its name and get it back
        except BaseException:
            self.close()
            raise

    def start(self, *options: str) -> "Dockerd":
        """Start the engine with its data."""
        command = [
            self._binary, "--config-file", str(self.place / "daemon.json"), "--data-root", str(self.data),
            "--exec-root", str(self.place / "x"), "--pidfile", str(self.place / "pid"), "-H", self.host,
            "--bridge=none", "--iptables=false", "--ip-forward=false", "--ip-masq=false", *options,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, preexec_fn=dying_with_us()
            )
        wait_for("a second dockerd", self._answers)
        return self

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop the engine. After SIGKILL, its containers and their shims live on; containerd itself dies with it."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(PATIENCE)
            self.process = None
            # If the pid in these files is in use, the next start would mistake that process for a running containerd.
            for left in ("pid", "x/containerd/containerd.pid"):
                (self.place / left).unlink(missing_ok=True)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as engine:
            engine.settimeout(20)
            engine.connect(str(self.socket))
            engine.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in engine.recv(100)

    def docker(self, *arguments: str) -> str:
        """Run the `docker` command on this engine, and return its output."""
        done = subprocess.run(["docker", "-H", self.host, *arguments], check=True, capture_output=True, text=True)
        return done.stdout

    def close(self) -> None:
        """Stop the engine, its containers and its containerd, and remove its data."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            with suppress(subprocess.SubprocessError):
                boxes = self.docker("ps", "-aq").split()
                if boxes:
                    self.docker("rm", "-f", *boxes)
        self.stop()
        for pid in self._leftovers():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        remove_place(self.place)

    def _leftovers(self) -> list[int]:
        """Return our processes of containerd and its shims, whose command lines name the directory."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = entry.read_bytes().split(b"\0")
                if b"containerd" in words[0] and any(bytes(self.place) in word for word in words):
                    found.append(int(entry.parent.name))
        return found
