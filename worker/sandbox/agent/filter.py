"""A second syscall filter, on top of Docker's: what a program to be judged has no business with fails with EPERM.

Docker's own profile, above all an older one, lets through address families and calls that have let programs out of
containers before. The filter is a few dozen comparisons in the kernel's own bytecode; filters only ever add up, and no
process can take one off. Numbers belong to one architecture, and every other one is killed at its first call.
"""

import ctypes
import errno
import os
import struct

_X86 = {
    "arch": 0xC000003E, "socket": 41, "socketpair": 53, "prlimit64": 302, "alien": 0x40000000, "clone": 56,
    "denied": (
        425, 426, 427,            # io_uring_setup, io_uring_enter, io_uring_register
        248, 249, 250,            # add_key, request_key, keyctl
        272, 308,                 # unshare, setns
        321, 298, 323, 101,       # bpf, perf_event_open, userfaultfd, ptrace
        310, 311,                 # process_vm_readv, process_vm_writev
        240, 29, 64, 68,          # mq_open, shmget, semget, msgget
        165, 166, 428, 429, 430, 431, 432, 433, 442,  # mount, umount2, open_tree … fspick, mount_setattr
        155, 161, 304,            # pivot_root, chroot, open_by_handle_at
    ),
}  # fmt: skip
_ARM64 = {
    "arch": 0xC00000B7, "socket": 198, "socketpair": 199, "prlimit64": 261, "alien": 0xFFFFFFFF, "clone": 220,
    "denied": (
        425, 426, 427, 217, 218, 219, 97, 268, 280, 241, 282, 117, 270, 271, 180, 194, 190, 186,
        40, 39, 428, 429, 430, 431, 432, 433, 442, 41, 51, 265,
    ),
}  # fmt: skip
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; never AF_NETLINK, AF_PACKET, AF_ALG, AF_VSOCK …

_CLONE3, _NEW = 435, 0x7E020000  # its arguments lie in memory: libraries do without it; all flags for new namespaces
_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0 = 0, 4, 16
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


def assemble() -> bytes:
    """The filter's program for this machine; empty where its numbers are not known."""
    table = {"x86_64": _X86, "aarch64": _ARM64}.get(os.uname().machine)
    if table is None:
        return b""
    denied: tuple[int, ...] = table["denied"]  # type: ignore[assignment]
    ends = ["allow", "deny", "absent", "kill"]
    code: list[tuple[int, int | str, int | str, int]] = [
        (_LOAD, 0, 0, _ARCH), (_JEQ, 0, "kill", table["arch"]),  # type: ignore[list-item]
        (_LOAD, 0, 0, _NR), (_JGE, "kill", 0, table["alien"]),  # type: ignore[list-item]
        *((_JEQ, "deny", 0, number) for number in denied),
        (_JEQ, "absent", 0, _CLONE3), (_JEQ, 0, 2, table["clone"]),  # type: ignore[list-item]
        (_LOAD, 0, 0, _ARG0), (_JSET, "deny", "allow", _NEW),
        (_JEQ, 3, 0, table["socket"]), (_JEQ, 2, 0, table["socketpair"]),  # type: ignore[list-item]
        (_JEQ, 1 + 1 + len(_FAMILIES) + 1, 0, table["prlimit64"]), (_RET, 0, 0, _ALLOW),  # type: ignore[list-item]
        (_LOAD, 0, 0, _ARG0), *((_JEQ, "allow", 0, family) for family in _FAMILIES), (_RET, 0, 0, _EPERM),
        (_LOAD, 0, 0, _ARG0), (_JEQ, "allow", "deny", 0),  # prlimit64 of another process
        (_RET, 0, 0, _ALLOW), (_RET, 0, 0, _EPERM), (_RET, 0, 0, _ENOSYS), (_RET, 0, 0, _KILL),
    ]  # fmt: skip
    first_end = len(code) - len(ends)

    def jump(target: int | str, here: int) -> int:
        return target if isinstance(target, int) else first_end + ends.index(target) - here - 1

    return b"".join(
        struct.pack("HBBI", op, jump(true, here), jump(false, here), k)
        for here, (op, true, false, k) in enumerate(code)
    )


def install() -> bool:
    """For this process and all it will ever start; False where there is none for this architecture."""
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
