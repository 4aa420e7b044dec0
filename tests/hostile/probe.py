"""Helpers for probing programs: raw system calls, and attempts that must fail in a certain way."""

import ctypes
import errno
import os
import platform
import sys

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
X86 = platform.machine() == "x86_64"
bad = []


def syscall(number, *args):
    """Make one raw system call; raise OSError if it fails."""
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if result == -1:
        raise OSError(ctypes.get_errno(), "syscall")
    return result


def attempt(name, allowed, call, *args, **more):
    """Make a call, and remember it as bad unless it fails with one of the allowed errors (`"EPERM|EACCES"`)."""
    try:
        value = call(*args, **more)
    except OSError as error:
        got = errno.errorcode.get(error.errno, type(error).__name__)
    except Exception as error:
        got = type(error).__name__
    else:
        got = f"SUCCEEDED {value!r:.80}"
    print(name, got, flush=True)
    if got not in allowed.split("|"):
        bad.append(name)


def write(path, data=b"x"):
    """Write to a file that exists already."""
    fd = os.open(path, os.O_WRONLY)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)


def create(path):
    """Create a file."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def done():
    """Exit 0 only if every attempt failed as it should."""
    print("bad:", bad or "none")
    sys.exit(1 if bad else 0)
