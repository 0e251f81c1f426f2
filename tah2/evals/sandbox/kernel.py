"""The few Linux calls that a sandbox is made of, through ctypes: Python has no names for them."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
import sys
from pathlib import Path

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_GET_SECCOMP, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 21, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS = 36, 38, 39

LANDLOCK = {"landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446}
SYSCALLS = {
    "x86_64": {
        "pivot_root": 155, "capget": 125, "capset": 126, "mount_setattr": 442, "socket": 41, "clone": 56, "clone3": 435,
        "ptrace": 101, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "chroot": 161, "bpf": 321,
        "add_key": 248, "request_key": 249, "keyctl": 250, "io_uring_setup": 425, "perf_event_open": 298,
        "userfaultfd": 323, "memfd_create": 319, "memfd_secret": 447, "process_vm_readv": 310,
        "process_vm_writev": 311, "kexec_load": 246, "init_module": 175, "finit_module": 313,
        "open_by_handle_at": 304, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "shmget": 29,
        **LANDLOCK,
    },
    "aarch64": {
        "pivot_root": 41, "capget": 90, "capset": 91, "mount_setattr": 442, "socket": 198, "clone": 220, "clone3": 435,
        "ptrace": 117, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "chroot": 51, "bpf": 280,
        "add_key": 217, "request_key": 218, "keyctl": 219, "io_uring_setup": 425, "perf_event_open": 241,
        "userfaultfd": 282, "memfd_create": 279, "memfd_secret": 447, "process_vm_readv": 270,
        "process_vm_writev": 271, "kexec_load": 104, "init_module": 105, "finit_module": 273,
        "open_by_handle_at": 265, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "shmget": 194,
        **LANDLOCK,
    },
}  # fmt: skip
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
DENIED = frozenset(SYSCALLS["x86_64"]) - {"capget", "capset", "socket", "clone", "clone3", *LANDLOCK}
"""Calls that no graded program needs: they reach other processes, the kernel's rarer doors, or uncounted memory."""


def supported() -> bool:
    return sys.platform == "linux" and platform.machine() in SYSCALLS


@functools.cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(libc().syscall(ctypes.c_long(SYSCALLS[platform.machine()][name]), *values), name)


def unshare(flags: int) -> None:
    _checked(libc().unshare(flags), "unshare")


def mount(source: str, target: str | Path, kind: str | None, flags: int, options: str = "") -> None:
    data = options.encode() if options else None
    name = kind.encode() if kind else None
    call = libc().mount(source.encode(), os.fsencode(target), name, ctypes.c_ulong(flags), data)
    _checked(call, f"mount {target}")


def unmount(target: str) -> None:
    _checked(libc().umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(folder: str) -> None:
    """Make `folder` the root and let go of the old one."""
    os.chdir(folder)
    syscall("pivot_root", b".", b".")
    unmount(".")
    os.chdir("/")


def make_read_only(target: Path) -> None:
    """`target` and every mount below it: read-only, without set-uid programs and devices."""
    attributes = struct.pack("=QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    at_current_folder, recursive = -100, 0x8000
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    try:
        syscall("mount_setattr", at_current_folder, os.fsencode(target), recursive, buffer, len(attributes))
    except OSError:  # Linux before 5.12: this mount alone, keeping the flags that must not be taken away
        kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("none", target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(libc().prctl(option, *padded), f"prctl {option}")


def give_up_capabilities() -> None:
    """No capability now, none after an exec, none from a set-uid program."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # EINVAL past the last one; EPERM where there was none to drop
            break
    syscall("capset", _capability_header(), ctypes.create_string_buffer(bytes(24), 24))


def _capability_header() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0), 8)


def capabilities() -> int:
    """The first 32 effective capabilities of this process, as bits."""
    found = ctypes.create_string_buffer(24)
    syscall("capget", _capability_header(), found)
    return int.from_bytes(found.raw[:4], "little")


def filtered() -> bool:
    """Whether a system call filter is installed, and no program that is started can shake it off."""
    filter_mode = 2
    return bool(
        libc().prctl(PR_GET_SECCOMP, 0, 0, 0, 0) == filter_mode and libc().prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1
    )


def filter_system_calls() -> None:
    """A seccomp filter: local sockets only, no new namespaces, none of `DENIED`; needs no privilege."""
    numbers = SYSCALLS[platform.machine()]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38
    new_namespaces = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | 0x2000000
    steps: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, AUDIT_ARCH[platform.machine()]),
        (give, 0, 0, refuse),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),  # the other calling convention of x86_64
        (give, 0, 0, refuse),
        (equal, 0, 1, numbers["clone3"]),  # its flags lie in memory, out of reach: libc then uses clone
        (give, 0, 0, unknown),
    ]
    for name in sorted(DENIED):
        steps += [(equal, 0, 1, numbers[name]), (give, 0, 0, refuse)]
    steps += [
        (equal, 0, 4, numbers["clone"]),
        (load, 0, 0, 16),
        (any_bit, 0, 1, new_namespaces),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
        (equal, 0, 3, numbers["socket"]),
        (load, 0, 0, 16),
        (equal, 1, 0, 1),  # AF_UNIX
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(steps), ctypes.addressof(instructions))
    holder = ctypes.create_string_buffer(program, len(program))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(holder))
