"""The probe: a program inside the sandbox that tries what must not work, and says what happened."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tah2.evals.sandbox import kernel

PROTECTIONS = {
    "own network": "no connection to anything, not even this machine",
    "own files": "only the interpreter and the system's programs can be read, only a temporary folder changed",
    "own processes": "no other process can be read or signalled",
    "no privileges": "no capabilities, none to be had, system calls filtered",
    "not root": "root's programs run as nobody",
    "limits": "memory, processor time, processes, file sizes and open files",
}


REQUIRED = ("own network", "own files", "no privileges", "not root", "limits")
"""Without these nothing is run. Other processes of the same user may be in reach where there are no namespaces."""


def probe(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "own network": _refused(_open_connection),
        "own files": all(_refused(Path(name).read_bytes) for name in (request["secret"], *OUTSIDE))
        and all(_refused(Path(folder, "tah2-probe").touch) for folder in WRITABLE),
        "own processes": _refused(partial(os.kill, request["parent"], 0))
        and _refused(Path(f"/proc/{request['parent']}/status").read_bytes),
        "no privileges": kernel.capabilities() == 0 and kernel.filtered(),
        "not root": os.geteuid() != 0,
        "limits": all(resource.getrlimit(kind)[1] != resource.RLIM_INFINITY for kind in LIMITED),
        "user": os.geteuid(),
    }


OUTSIDE = ("/etc/shadow", "/etc/passwd", "/proc/1/environ")
WRITABLE = ("/usr", "/var/tmp", "/dev")
"""Folders that root, or everybody, can write outside."""
LIMITED = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CPU,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_NPROC,
    resource.RLIMIT_NOFILE,
)


def _refused(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


def _open_connection() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.connect(("127.0.0.1", 9))
