"""A second syscall filter, on top of Docker's: calls that no program to be judged needs fail with EPERM.

Docker's own profile, above all an older one, lets through address families and calls that have let programs out of
containers before. The filter is a few dozen comparisons in the kernel's own bytecode; filters only ever add up, and no
process can remove one. Call numbers belong to one architecture, and a process of any other is killed at its first call.
"""

import ctypes
import errno
import os
import struct

_X86 = {
    "arch": 0xC000003E, "alien": 0x40000000, "clone": 56, "socket": 41, "socketpair": 53, "setsockopt": 54, "ioctl": 16,
    "prlimit64": 302,
    "denied": (
        425, 426, 427,            # io_uring_setup, io_uring_enter, io_uring_register
        248, 249, 250,            # add_key, request_key, keyctl
        272, 308,                 # unshare, setns
        321, 298, 323, 101,       # bpf, perf_event_open, userfaultfd, ptrace
        310, 311,                 # process_vm_readv, process_vm_writev
        240, 29, 64, 68,          # mq_open, shmget, semget, msgget
        165, 166, 428, 429, 430, 431, 432, 433, 442,  # mount, umount2, open_tree … fspick, mount_setattr
        155, 161, 304,            # pivot_root, chroot, open_by_handle_at
        154, 447,                 # modify_ldt, memfd_secret
    ),
    "skipped": (162, 306),        # sync, syncfs
}  # fmt: skip
_ARM64 = {
    "arch": 0xC00000B7, "alien": 0xFFFFFFFF, "clone": 220, "socket": 198, "socketpair": 199, "setsockopt": 208,
    "ioctl": 29, "prlimit64": 261,
    "denied": (
        425, 426, 427, 217, 218, 219, 97, 268, 280, 241, 282, 117, 270, 271, 180, 194, 190, 186,
        40, 39, 428, 429, 430, 431, 432, 433, 442, 41, 51, 265, 447,
    ),
    "skipped": (81, 267),
}  # fmt: skip
_UNIX, _INET, _INET6 = 1, 2, 10  # the allowed families; never AF_NETLINK, AF_PACKET, AF_ALG, AF_VSOCK …
_DEFAULT, _TCP, _UDP = 0, 6, 17  # and their protocols; never ICMP (ping), SCTP, UDPLITE, MPTCP …
_TCP_ULP, _TIOCSETD = 31, 0x5423  # would load a protocol above TCP, or below a terminal, into the kernel

_CLONE3, _NEW = 435, 0x7E020000  # its arguments lie in memory: libraries do without it; all flags for new namespaces
_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


def assemble() -> bytes:
    """Return the filter's program for this machine; it is empty if the call numbers of its processor are not known."""
    table = {"x86_64": _X86, "aarch64": _ARM64}.get(os.uname().machine)
    if table is None:
        return b""
    denied: tuple[int, ...] = table["denied"]  # type: ignore[assignment]
    skipped: tuple[int, ...] = table["skipped"]  # type: ignore[assignment]
    ends = {
        "allow": _ALLOW,
        "deny": _ERRNO | errno.EPERM,
        "absent": _ERRNO | errno.ENOSYS,
        "done": _ERRNO,  # reports success at once: the call would wait for all disks of the host
        "kill": _KILL,
    }
    code: list[tuple[int, int | str, int | str, int]] = [
        (_LOAD, 0, 0, _ARCH), (_JEQ, 0, "kill", table["arch"]),  # type: ignore[list-item]
        (_LOAD, 0, 0, _NR), (_JGE, "kill", 0, table["alien"]),  # type: ignore[list-item]
        *((_JEQ, "deny", 0, number) for number in denied), *((_JEQ, "done", 0, number) for number in skipped),
        (_JEQ, "absent", 0, _CLONE3),
        # One block for each call whose arguments matter; every other call jumps over it.
        (_JEQ, 0, 2, table["clone"]), (_LOAD, 0, 0, _ARG0), (_JSET, "deny", "allow", _NEW),  # type: ignore[list-item]
        (_JEQ, 0, 2, table["prlimit64"]), (_LOAD, 0, 0, _ARG0),  # type: ignore[list-item]
        (_JEQ, "allow", "deny", 0),  # of this process, not of another
        (_JEQ, 0, 2, table["ioctl"]), (_LOAD, 0, 0, _ARG1), (_JEQ, "deny", "allow", _TIOCSETD),  # type: ignore[list-item]
        (_JEQ, 0, 4, table["setsockopt"]), (_LOAD, 0, 0, _ARG1), (_JEQ, 0, "allow", _TCP),  # type: ignore[list-item]
        (_LOAD, 0, 0, _ARG2), (_JEQ, "deny", "allow", _TCP_ULP),
        (_JEQ, 1, 0, table["socket"]), (_JEQ, 0, "allow", table["socketpair"]),  # type: ignore[list-item]
        (_LOAD, 0, 0, _ARG0), (_JEQ, "allow", 0, _UNIX), (_JEQ, 1, 0, _INET), (_JEQ, 0, "deny", _INET6),
        (_LOAD, 0, 0, _ARG2), (_JEQ, "allow", 0, _DEFAULT), (_JEQ, "allow", 0, _TCP), (_JEQ, "allow", "deny", _UDP),
    ]  # fmt: skip
    first_end = len(code)
    code += [(_RET, 0, 0, value) for value in ends.values()]

    def jump(target: int | str, here: int) -> int:
        return target if isinstance(target, int) else first_end + [*ends].index(target) - here - 1

    return b"".join(
        struct.pack("HBBI", op, jump(true, here), jump(false, here), k)
        for here, (op, true, false, k) in enumerate(code)
    )


def install() -> bool:
    """Install the filter for this process and all that it will ever start; return False if there is none for this
    processor."""
    program = assemble()
    if not program:
        return False
    memory = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(memory)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
    return True
