"""For machines that forbid namespaces: the program stays in the machine's own tree, behind a Landlock fence.

It needs no privilege, only Linux 5.13. What lies outside the fence can be named but neither read nor written; from
Linux 6.12 on, processes outside cannot be signalled either. The system call filter keeps the network away.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

from tah2.evals.sandbox import kernel
from tah2.evals.sandbox.jail import DEVICES, SYSTEM

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | READ_DIR
FILES_ALONE = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14
"""What can be allowed of something that is no folder."""
RIGHTS_SINCE = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""Version of Landlock -> rights over files that it can withhold for the first time."""
ABSTRACT_SOCKETS_AND_SIGNALS = 3


def version() -> int:
    """Of Landlock in this kernel; 0 where there is none."""
    try:
        return kernel.syscall("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def raise_fence(readable: tuple[Path, ...], writable: tuple[Path, ...]) -> None:
    """From here on this process and its children may read `readable`, change `writable`, and nothing else."""
    have = version()
    rights = sum(new for since, new in RIGHTS_SINCE.items() if since <= have)
    scoped = ABSTRACT_SOCKETS_AND_SIGNALS if have >= 6 else 0
    attributes = struct.pack("=QQQ", rights, 0, scoped)[: 24 if have >= 6 else 16 if have >= 4 else 8]
    rules = kernel.syscall("landlock_create_ruleset", _buffer(attributes), len(attributes), 0)
    devices = [Path("/dev") / name for name in DEVICES]
    for path in (*readable, *map(Path, SYSTEM), *devices):
        _allow(rules, path, READ & rights)
    for path in (*writable, Path("/dev/null"), Path("/dev/shm")):
        _allow(rules, path, rights)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.syscall("landlock_restrict_self", rules, 0)
    os.close(rules)


def _allow(rules: int, path: Path, rights: int) -> None:
    try:
        holder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not path.is_dir():
        rights &= FILES_ALONE
    beneath = 1
    kernel.syscall("landlock_add_rule", rules, beneath, _buffer(struct.pack("=Qi", rights, holder)), 0)
    os.close(holder)


def _buffer(content: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(content, len(content))
