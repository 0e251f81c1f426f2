"""A room of its own for one program: its own processes, files, network and, where it was root's, user.

`JailPlan` says what the program may read. Nothing else of the machine exists inside: no home, no /etc/shadow, no
other process. What the program starts, however it hides, dies with process 1 of the room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tah2.evals.sandbox import kernel
from tah2.evals.sandbox.limits import Kind, Limits

NOBODY = 65534
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("null", "zero", "full", "random", "urandom")
TEMPORARY = "/tmp"  # the room's own, not the machine's


@dataclass(frozen=True)
class JailPlan:
    """`root` is an empty folder to build in; `readable` are the folders besides the system's that exist inside."""

    kind: Kind
    root: Path
    readable: tuple[Path, ...]

    @property
    def scratch(self) -> Path:
        """Where a program without a room of its own may write."""
        return self.root / "scratch"


def python_folders(more: Iterable[str] = ()) -> tuple[Path, ...]:
    """The interpreter, its libraries, the package tah2 and `more`; not the rest of the import path.

    That path may hold somebody's home. Modules from there are imported ahead, outside.
    """
    wanted = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[2]}
    wanted |= {Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")}
    wanted |= {Path(entry) for entry in (*more, *os.environ.get("LD_LIBRARY_PATH", "").split(":")) if entry}
    folders = sorted({folder.absolute() for folder in wanted} | {folder.resolve() for folder in wanted})
    outer: list[Path] = []
    for folder in folders:
        if folder.is_dir() and not any(folder.is_relative_to(found) for found in (*outer, Path("/usr"))):
            outer.append(folder)
    return tuple(outer)


def user_maps(pid: int) -> None:
    """Called from outside for a process that has just entered its user namespace.

    Root's program runs as nobody, and needs root's name only to build the room; another user keeps the own name,
    because nobody else's can be given to it.
    """
    uid, gid = os.geteuid(), os.getegid()
    folder = Path(f"/proc/{pid}")
    if uid == 0:
        (folder / "uid_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        (folder / "gid_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
    else:
        (folder / "setgroups").write_text("deny")
        (folder / "uid_map").write_text(f"{uid} {uid} 1\n")
        (folder / "gid_map").write_text(f"{gid} {gid} 1\n")


def build_room(plan: JailPlan, limits: Limits) -> None:
    """As process 1 of new namespaces: put the machine's root out of reach."""
    root = plan.root
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for name in SYSTEM:
        _show(Path(name), root)
    _scratch(root / TEMPORARY.lstrip("/"), limits.file_mb)  # before what is shown: an interpreter may live under it
    for folder in plan.readable:
        _show(folder, root)
    _devices(root / "dev")
    _proc(root / "proc")
    _scratch(root / "dev" / "shm", limits.file_mb)
    kernel.mount("none", root, None, kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    kernel.pivot_root(str(root))
    os.chdir(TEMPORARY)


def _show(source: Path, root: Path) -> None:
    """`source` at its own place under `root`, read-only; a link stays a link."""
    target = root / source.relative_to("/")
    if target.exists() or target.is_symlink() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
        return
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    kernel.mount(str(source), target, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(target)


def _devices(folder: Path) -> None:
    folder.mkdir()
    for name in DEVICES:
        (folder / name).touch()
        kernel.mount(f"/dev/{name}", folder / name, None, kernel.MS_BIND)
    (folder / "shm").mkdir()
    (folder / "fd").symlink_to("/proc/self/fd")


def _proc(folder: Path) -> None:
    """Only the room's processes. A container that hides parts of /proc forbids it; then there is none."""
    folder.mkdir()
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    try:
        kernel.mount("proc", folder, "proc", flags)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise


def _scratch(folder: Path, megabytes: int) -> None:
    folder.mkdir(exist_ok=True)
    options = f"size={megabytes}m,nr_inodes=4096,mode=1777"
    kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def open_to_all(folder: Path) -> bool:
    """Whether every user can go to `folder`; root's home, where an interpreter may live, is not."""
    return all(place.stat().st_mode & 1 for place in (folder.resolve(), *folder.resolve().parents))


def become_nobody(plan: JailPlan) -> None:
    """Root's program goes on as nobody; another user's as that user. Neither keeps a capability.

    Without a room, where nobody could not reach the interpreter and import from it, root's stays root's.
    """
    reachable = plan.kind == "room" or all(map(open_to_all, (Path(sys.prefix), Path(sys.base_prefix))))
    if os.geteuid() == 0 and reachable:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.give_up_capabilities()


def counts_by_namespace() -> bool:
    """Since Linux 5.14 the limit on processes counts those of the user namespace, not all of the user."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int(minor.split("-")[0])) >= (5, 14)


def processes_of(uid: int) -> int:
    """Processes of `uid` that run now."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                count += entry.stat().st_uid == uid
    return count


def limit_resources(limits: Limits, others: int) -> None:
    """`others`: processes outside the room that the limit on processes counts along."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if _has_proc() else 1 << 30
    memory = held + (limits.memory_mb << 20)
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_CPU, limits.cpu_seconds, grace=1)
    _limit(resource.RLIMIT_FSIZE, limits.file_mb << 20)
    _limit(resource.RLIMIT_NOFILE, limits.open_files)
    _limit(resource.RLIMIT_NPROC, limits.processes + others)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_MEMLOCK, 0)
    _limit(resource.RLIMIT_MSGQUEUE, 0)


def _limit(kind: int, value: int, grace: int = 0) -> None:
    _, hard = resource.getrlimit(kind)
    ceiling = value + grace if hard == resource.RLIM_INFINITY else min(value + grace, hard)
    resource.setrlimit(kind, (min(value, ceiling), ceiling))


def _has_proc() -> bool:
    return Path("/proc/self/statm").exists()
