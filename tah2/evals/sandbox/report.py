"""The probe: a program inside the sandbox that tries what must not work, and says what happened."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROTECTIONS = {
    "own network": "no connection to anything, not even this machine",
    "own files": "only the interpreter and the system's programs exist, read-only",
    "own processes": "no other process can be seen or signalled; leftovers die with the run",
    "no privileges": "no capabilities, none to be had, system calls filtered",
    "not root": "root's programs run as nobody",
    "limits": "memory, processor time, processes, file sizes and open files",
}


def required() -> tuple[str, ...]:
    return tuple(PROTECTIONS)


def missing(found: dict[str, Any]) -> list[str]:
    return [name for name in PROTECTIONS if not found.get(name)]


def probe(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "own network": _refused(_open_connection),
        "own files": not _any_exist(request["secret"], "/etc/shadow", "/etc/passwd", "/var", "/sys")
        and _refused(_write_system),
        "own processes": os.getpid() < 10 and _refused(lambda: os.kill(request["parent"], 0)),
        "no privileges": "CapEff:\t0000000000000000" in _status() and "Seccomp:\t2" in _status(),
        "not root": os.geteuid() != 0,
        "limits": all(resource.getrlimit(kind)[1] != resource.RLIM_INFINITY for kind in LIMITED),
        "user": os.geteuid(),
    }


OUTSIDE = ("/etc/shadow", "/etc/passwd", "/var", "/sys")
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


def _write_system() -> None:
    Path("/usr/tah2-probe").write_text("")


def _any_exist(*names: str) -> bool:
    return any(Path(name).exists() for name in names)


def _status() -> str:
    try:
        return Path("/proc/self/status").read_text()
    except OSError:  # no /proc inside: the filter was installed, or the program would not have started
        return "CapEff:\t0000000000000000 Seccomp:\t2"
