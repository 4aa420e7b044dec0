"""`deploy/setup redis` in namespaces of its own: no network, empty /run and /var/lib, and no process outlives it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, missing

pytestmark = pytest.mark.redis

NOBODY = 65534
WORLD = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
BEGIN = "set -eu; mount -t tmpfs -o mode=755 none /run; mount -t tmpfs -o mode=755 none /var/lib; umask 022\n"
LOOK = """
import json, os, pwd, socket, stat, sys
from pathlib import Path
import redis
from evalpool.schemas.settings import settings
url = settings().queue_url
server = next(p for p in Path("/proc").glob("[0-9]*") if (p / "comm").read_text() == "redis-server\\n")
def owned(path):
    found = os.stat(path)
    return [pwd.getpwuid(found.st_uid)[0], stat.S_IMODE(found.st_mode)]
def reached(user):
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        try:
            socket.socket(socket.AF_UNIX).connect(url.removeprefix("unix://").removesuffix("?db=0"))
        except PermissionError:
            os._exit(7)
        os._exit(0)
    return {0: "may", 7: "may not"}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
print(json.dumps({
    "url": url,
    "broker": settings().broker_url,
    "runs as": pwd.getpwuid(server.stat().st_uid)[0],
    "files": {path: owned(path) for path in sys.argv[1:]},
    "ports": len(Path("/proc/net/tcp").read_text().splitlines()) - 1,
    "nobody": reached(65534),
    "root": reached(0),
    "somebody": reached(4242),
    "says": bool(redis.Redis.from_url(url).ping()),
}))
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may enter, with a copy of the script. Its path is short, as that of a socket must be."""
    if shutil.which("redis-server") is None:
        missing("no redis-server here")
    if subprocess.run([*WORLD, "true"], capture_output=True).returncode:
        missing("no namespaces can be made here")
    with tempfile.TemporaryDirectory(prefix="ep-") as folder:
        path = Path(folder)
        path.chmod(0o755)
        (path / "deploy").mkdir()
        shutil.copy(ROOT / "deploy" / "setup", path / "deploy")
        yield path


@pytest.fixture
def run(place: Path) -> Callable[..., list[str]]:
    """Runs a shell script in such a namespace, and returns the lines that it prints."""

    def inside(script: str, **env: str) -> list[str]:
        given = {name: value for name, value in os.environ.items() if not name.startswith(("EVALPOOL_", "XDG_"))}
        given |= {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "LOOK": LOOK} | env
        command = [*WORLD, "bash", "-c", BEGIN + script]
        done = subprocess.run(command, cwd=place, env=given, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return inside


def test_a_redis_of_root_runs_as_another_user_on_a_socket_that_others_cannot_reach(
    run: Callable[..., list[str]],
) -> None:
    looked_at = "/run/evalpool /run/evalpool/redis /run/evalpool/redis/redis.sock /var/lib/evalpool/redis"
    lines = run(f'deploy/setup redis; deploy/setup redis; "$PYTHON" -c "$LOOK" {looked_at}')
    assert lines[:3] == [
        "redis     starting redis-server on /run/evalpool/redis/redis.sock, data in /var/lib/evalpool/redis",
        "redis     ok (/run/evalpool/redis/redis.sock)",
        "redis     ok (/run/evalpool/redis/redis.sock)",
    ]
    found: dict[str, Any] = json.loads(lines[3])
    assert found.pop("files") == {
        "/run/evalpool": ["root", 0o755],
        "/run/evalpool/redis": ["redis", 0o750],
        "/run/evalpool/redis/redis.sock": ["redis", 0o770],
        "/var/lib/evalpool/redis": ["redis", 0o700],
    }
    assert found == {
        "url": "unix:///run/evalpool/redis/redis.sock?db=0",
        "broker": "redis+socket:///run/evalpool/redis/redis.sock?virtual_host=0",
        "runs as": "redis",
        "ports": 0,
        "nobody": "may not",
        "root": "may",
        "somebody": "may not",
        "says": True,
    }


def test_a_redis_of_another_user_can_be_reached_by_this_user_only(run: Callable[..., list[str]], place: Path) -> None:
    home = place / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    state = home / "state" / "evalpool"
    lines = run(
        "setpriv --reuid nobody --regid nogroup --clear-groups deploy/setup redis\n"
        f'"$PYTHON" -c "$LOOK" {state} {state}/redis {state}/redis/redis.sock',
        XDG_STATE_HOME=str(home / "state"),
    )
    assert lines[1] == f"redis     ok ({state}/redis/redis.sock)"
    found: dict[str, Any] = json.loads(lines[2])
    assert set(map(tuple, found["files"].values())) == {("nobody", 0o700)}
    assert found["url"] == f"unix://{state}/redis/redis.sock?db=0"
    assert (found["runs as"], found["ports"]) == ("nobody", 0)
    assert (found["nobody"], found["somebody"]) == ("may", "may not")


def test_a_redis_that_runs_already_is_used_and_a_stale_socket_is_removed(run: Callable[..., list[str]]) -> None:
    if shutil.which("ip") is None:
        missing("no ip here")
    lines = run(
        "ip link set lo up\n"
        "mkdir -p /run/evalpool/redis\n"
        '"$PYTHON" -c \'import socket; socket.socket(socket.AF_UNIX).bind("/run/evalpool/redis/redis.sock")\'\n'
        "redis-server --port 6379 --save '' --dir /run > /dev/null &\n"
        "until redis-cli ping > /dev/null 2>&1; do sleep 0.1; done\n"
        "deploy/setup redis\n"
        '"$PYTHON" -c "from schemas.settings import settings; print(settings().queue_url)"'
    )
    assert lines == ["redis     ok (127.0.0.1:6379)", "redis://localhost:6379/0"]


def test_no_redis_is_started_if_the_environment_names_one(run: Callable[..., list[str]]) -> None:
    script = "deploy/setup redis; [ ! -e /run/evalpool ] && echo untouched"
    assert run(script, EVALPOOL_REDIS_URL="redis://elsewhere/0") == ["redis     ok (EVALPOOL_REDIS_URL)", "untouched"]


@pytest.mark.parametrize("name", [".env", "fleet.env"])
def test_no_redis_is_started_if_a_settings_file_names_one(
    run: Callable[..., list[str]], place: Path, name: str
) -> None:
    (place / name).write_text("EVALPOOL_SLOTS=1\nEVALPOOL_REDIS_URL='redis://elsewhere/0'\n")
    script, named = "deploy/setup redis; [ ! -e /run/evalpool ] && echo untouched", {"EVALPOOL_ENV_FILE": name}
    lines = run(script, **({} if name == ".env" else named))
    assert lines == ["redis     ok (EVALPOOL_REDIS_URL)", "untouched"]
