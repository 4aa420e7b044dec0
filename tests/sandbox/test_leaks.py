"""Nothing of one program reaches the next one in the same sandbox: one program plants secrets, the next finds none."""

from dataclasses import replace

import pytest

from evalpool.schemas import Limits
from evalpool.worker.sandbox.base import Command
from evalpool.worker.sandbox.docker import DockerBox
from tests.sandbox.test_contract import bash, python

pytestmark = pytest.mark.docker

# ruff: noqa: E501 - programs are data

PLANT = r"""
import builtins, ctypes, gc, json, locale, mmap, multiprocessing.shared_memory, os, resource, signal, socket, subprocess, sys
import tempfile, threading, time, random
for place in ("/box", "/tmp", "/dev/shm", "/var/tmp", "/dev/mqueue", "/run", "/root", "/", "/dev", "/etc"):
    for kind in (lambda p: open(p, "w").write("planted"), os.mkdir, os.mkfifo, lambda p: os.symlink("/etc/passwd", p)):
        try: kind(f"{place}/planted-{os.urandom(3).hex()}")
        except OSError: pass
os.makedirs("/box/deep/" + "/".join("d" * 200 for _ in range(10)))
memory = multiprocessing.shared_memory.SharedMemory(create=True, size=4096, name="planted")
semaphore = multiprocessing.get_context("fork").Semaphore(1)
server = socket.create_server(("127.0.0.1", 45678))
unix = socket.socket(socket.AF_UNIX); unix.bind("\0planted"); unix.listen()
os.environ["PLANTED"] = "1"; os.putenv("PLANTED2", "1")
os.umask(0o777); time.tzset(); os.environ["TZ"] = "Asia/Tokyo"; time.tzset(); locale.setlocale(locale.LC_ALL, "C")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1]); signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 0.05); signal.signal(signal.SIGALRM, signal.SIG_IGN)
json.dumps = builtins.print = len; sys.path.insert(0, "/tmp/planted"); sys.modules["planted"] = sys; sys.setrecursionlimit(77777)
sys.settrace(lambda *a: None); threading.setprofile(lambda *a: None); sys.dont_write_bytecode = True; random.seed(7)
gc.disable(); os.nice(5); resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); sys.setswitchinterval(9)
held = open("/tmp/held", "w"); held.write("x" * 100000); held.flush(); os.unlink("/tmp/held")
secret = "PLANTED-" + "SECRET-IN-MEMORY"; sys.stdout.write(secret); sys.stderr.write(secret)
subprocess.Popen(["bash", "-c", "trap '' TERM HUP; exec 0<&- 1>&- 2>&-; while :; do :; done"], start_new_session=True)
if not os.fork():
    os.setsid(); held.read if 0 else time.sleep(1000)
"""

FIND = r"""
import builtins, gc, glob, json, locale, os, random, resource, signal, socket, sys, threading, time
def found(path):
    return sorted(os.path.join(d, n) for d, ds, fs in os.walk(path) for n in ds + fs)
places = {place: found(place) for place in ("/box", "/tmp", "/dev/shm", "/var/tmp", "/dev/mqueue", "/run")}
places["/box"].remove("/box/main.py")
def refused(family, address):
    s = socket.socket(family); s.settimeout(2)
    try: s.connect(address); return False
    except OSError: return True
state = {
    "places": places,
    "processes": [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getpid())],
    "tcp": open("/proc/net/tcp").read().count("\n"), "unix": [l for l in open("/proc/net/unix") if "@" in l],
    "refused": refused(socket.AF_UNIX, "\0planted"),
    "environ": sorted(os.environ), "umask": os.umask(0o22), "tz": (time.tzname, os.environ.get("TZ")),
    "locale": locale.setlocale(locale.LC_ALL), "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "handlers": [int(s) for s in signal.valid_signals() if signal.getsignal(s) != signal.SIG_DFL],
    "timer": signal.getitimer(signal.ITIMER_REAL), "builtins": (builtins.print is len, json.dumps is len),
    "path": sys.path, "modules": "planted" in sys.modules, "recursion": sys.getrecursionlimit(),
    "trace": (sys.gettrace() is None, threading.getprofile() is None), "bytecode": sys.dont_write_bytecode,
    "gc": (gc.isenabled(), gc.get_threshold()), "nice": os.nice(0), "switch": sys.getswitchinterval(),
    "limits": [resource.getrlimit(getattr(resource, n)) for n in sorted(dir(resource)) if n.startswith("RLIMIT_")],
    "cwd": os.getcwd(), "ids": (os.getgid(), os.getgroups()), "descriptors": sorted(os.listdir("/proc/self/fd"))[:5],
    "oom": open("/proc/self/oom_score_adj").read(),
    "free": [(v.f_bfree, v.f_ffree) for v in map(os.statvfs, ("/tmp", "/dev/shm"))],
    "ipc": [open(f).read().count("\n") for f in sorted(glob.glob("/proc/sysvipc/*"))],
}
print(state)
"""

SCAN = r"""
import re
needle, hits = re.compile(b"PLANTED-[S]ECRET"), 0  # a pattern that does not match itself
for line in open("/proc/self/maps"):
    span, mode, *rest = line.split()
    if mode[0] != "r" or rest[-1] in ("[vvar]", "[vsyscall]"): continue
    start, end = (int(part, 16) for part in span.split("-"))
    with open("/proc/self/mem", "rb", 0) as memory:
        memory.seek(start)
        try: hits += len([m for m in needle.finditer(memory.read(end - start))])
        except OSError: pass
print(hits)
"""


async def test_the_next_program_finds_a_sandbox_as_at_birth(box: DockerBox) -> None:
    limits = Limits(wall_seconds=20)
    before = await box.run(python(FIND, limits=limits))
    assert before.exit_code == 0, before.stderr
    assert await box.reset()
    for _ in range(3):
        planted = await box.run(python(PLANT, limits=limits, check=b"assert secret", env={"PLANTED0": "1"}))
        assert planted.exit_code == 0, planted.stderr
        if not await box.reset():
            break  # a sandbox that fails its reset is destroyed, which is as good; plants are tested one by one below
        after = await box.run(python(FIND, limits=limits))
        assert after.stdout == before.stdout
        assert await box.reset()


async def test_a_sandbox_with_a_lingering_socket_fails_its_reset(box: DockerBox) -> None:
    code = "import socket\ns = socket.create_server(('127.0.0.1', 4567))\nc = socket.create_connection(('127.0.0.1', 4567))\n"
    await box.run(python(code + "a, _ = s.accept(); a.close(); c.close(); s.close()"))
    assert not await box.reset()


@pytest.mark.parametrize("kind", ["python", "bash"])
async def test_no_text_of_a_program_stays_in_the_memory_of_the_agent(box: DockerBox, kind: str) -> None:
    word = b"PLANTED-" + b"SECRET"
    stdin, files = word * 3000, {"f": word * 3000}
    if kind == "python":
        program = python(
            "import sys; print(sys.stdin.read())", stdin=stdin, files=files, args=("a",), check=b"x = '%s'" % word
        )
    else:
        program = bash("cat; cat f >&2", stdin=stdin, files=files)
    for _ in range(3):
        outcome = await box.run(program)
        assert word in outcome.stdout
        assert await box.reset()
        scan = await box.run(python(SCAN, limits=Limits(cpu_seconds=20)))
        assert (scan.stdout, scan.stderr) == (b"0\n", b"")
        assert await box.reset()


async def test_a_program_that_is_kept_for_its_next_case_is_given_again_as_it_was(box: DockerBox) -> None:
    code = "import os; print(input(), open('d/f').read()); open('d/f', 'w').write('changed'); os.remove('d/g')"
    first = python(code, files={"d/f": b"data", "d/g": b""}, stdin=b"1" * 100_000 + b"\n", more=True)
    for program in (first, replace(first, stdin=b"2\n", args=("x",)), replace(first, stdin=b"3\n", more=False)):
        outcome = await box.run(program)
        assert outcome.stdout == program.stdin.strip() + b" data\n", outcome.stderr
        assert await box.reset()


@pytest.mark.parametrize("large", [1, 100_000])
async def test_no_other_program_finds_one_that_is_kept_for_its_next_case(box: DockerBox, large: int) -> None:
    word = b"PLANTED-" + b"SECRET"
    kept = python(f"#{word.decode()}\nprint(1)", files={"f": word * large}, stdin=word, more=True)
    for _ in range(2):
        assert (await box.run(kept)).stdout == b"1\n"
        assert await box.reset()
    for _ in range(2):
        scan = await box.run(python(SCAN, limits=Limits(cpu_seconds=20)))
        assert (scan.stdout, scan.stderr) == (b"0\n", b"")
        assert await box.reset()
    assert (await box.run(kept)).stdout == b"1\n"


async def test_no_command_of_a_session_finds_a_program_that_was_kept(box: DockerBox) -> None:
    kept = python("print(1)", files={"f": b"PLANTED-" + b"SECRET"}, more=True)
    await box.run(kept)
    assert await box.reset()
    heard: list[bytes] = []
    await box.spawn(Command(code=SCAN.encode()), lambda _, data: heard.append(data)).over
    assert b"".join(heard) == b"0\n"
    assert await box.reset()
    assert (await box.run(kept)).stdout == b"1\n"


async def test_a_case_does_not_find_the_input_of_the_case_before(box: DockerBox) -> None:
    first = python(SCAN, stdin=b"PLANTED-" + b"SECRET", more=True, limits=Limits(cpu_seconds=20))
    for program in (first, replace(first, stdin=b"")):
        outcome = await box.run(program)
        assert await box.reset()
    assert outcome.stdout == b"0\n"


async def test_the_check_is_nowhere_in_memory_while_the_program_runs(box: DockerBox) -> None:
    outcome = await box.run(python(SCAN, check=b"x = 'PLANTED-SECRET'", limits=Limits(cpu_seconds=20)))
    assert (outcome.stdout, outcome.checked) == (b"0\n", True)


async def test_a_socket_that_lies_in_its_own_queue_is_gone_or_ends_the_sandbox(box: DockerBox) -> None:
    """No process holds such a socket any more, but it keeps the files that it carries alive until the kernel collects it."""
    outcome = await box.run(
        python(
            "import socket, os\n"
            "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
            "memory = os.memfd_create('x')\n"
            "os.write(memory, bytes(1 << 20))\n"
            "socket.send_fds(b, [b'x'], [memory, a.fileno()])\n"
            "b.close()\n"
            "os._exit(0)"
        )
    )
    assert outcome.exit_code == 0
    if await box.reset():  # the kernel was quick enough
        seen = await box.run(python("print(open('/proc/net/sockstat').readline())"))
        assert seen.stdout.split() == [b"sockets:", b"used", b"0"]


async def test_ordinary_sockets_leave_nothing(box: DockerBox) -> None:
    code = "import socket\na, b = socket.socketpair(); u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 0))"
    assert (await box.run(python(code))).exit_code == 0
    assert await box.reset()
