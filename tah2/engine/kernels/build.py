"""Compile the kernels at first use and load them; without them everything runs on stock PyTorch.

The shared library lies in a folder of the user's cache (`TAH2_CACHE_DIR`, else `XDG_CACHE_HOME/tah2`, else
`~/.cache/tah2`) under a name derived from source, flags, compiler, torch version and processor, so that a stale or
foreign one is never loaded. It is compiled beside its final name and renamed: processes that compile at the same time
replace each other's identical file. `TAH2_NO_KERNELS=1` turns the kernels off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

log = logging.getLogger(__name__)
NATIVE = Path(__file__).parent / "native"
COMPILE_SECONDS = 120


class Unavailable(Exception):
    """Why there are no kernels, for the log."""


def functions() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they are off or cannot be had (logged once)."""
    if os.environ.get("TAH2_NO_KERNELS", "") not in ("", "0"):
        return None
    return _compiled()


def loaded() -> ctypes.CDLL | None:
    """The compiled kernels if somebody has asked for them already; compiles nothing."""
    return functions() if _compiled.cache_info().currsize else None


def available() -> bool:
    """Do compiled kernels run here? Asking compiles them."""
    return functions() is not None


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    try:
        return _declare(ctypes.CDLL(str(_built())))
    except (Unavailable, OSError, subprocess.SubprocessError) as problem:
        log.warning("No compiled CPU kernels, stock PyTorch instead: %s", problem)
        return None


def cache_folder() -> Path:
    if named := os.environ.get("TAH2_CACHE_DIR"):
        return Path(named) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tah2" / "kernels"


def _built() -> Path:
    """Path of the library for this machine, compiled if it is not there yet."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or shutil.which(compiler) is None:
        raise Unavailable("there is no C++ compiler (c++, g++, clang++ or the one named by CXX)")
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = folder / f"kernels-{_key(compiler)}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / target.name
            _compile(compiler, fresh)
            fresh.replace(target)
    return target


def _compile(compiler: str, target: Path) -> None:
    """With OpenMP where the compiler has it, else for one thread."""
    base = [compiler, *_flags(), str(NATIVE / "kernels.cpp"), "-o", str(target)]
    for openmp in (["-fopenmp", *_torch_openmp()], ["-Wno-unknown-pragmas"]):
        done = subprocess.run([*base, *openmp], capture_output=True, text=True, timeout=COMPILE_SECONDS)
        if done.returncode == 0:
            return
    lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit status {done.returncode}"]
    raise Unavailable(f"{compiler} failed: {lines[0]}")


def _flags() -> list[str]:
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    return ["-O3", native, "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC"]


def _torch_openmp() -> list[str]:
    """torch's own OpenMP runtime, if it ships one: two runtimes would be two thread pools on the same cores."""
    return [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]]


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_SECONDS).stdout
    sources = [path.read_bytes() for path in sorted(NATIVE.iterdir()) if path.suffix in (".h", ".cpp")]
    facts = [" ".join(_flags()), version, torch.__version__, platform.machine(), _processor()]
    return hashlib.sha256(b"\0".join([*sources, *(fact.encode() for fact in facts)])).hexdigest()[:20]


def _processor() -> str:
    """What `-march=native` depends on: the processor's features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library.tah2_linear.argtypes = [pointer, pointer, whole, whole, pointer, whole, whole]
    library.tah2_attend.argtypes = [pointer, pointer, pointer, whole, whole, whole, real, pointer]
    library.tah2_block_step.argtypes = [pointer, pointer, pointer, pointer]
    library.tah2_largest.argtypes = [pointer, whole, pointer, whole, whole, pointer, whole]
    library.tah2_mix.argtypes = [pointer, pointer, pointer, pointer, pointer, whole, whole, pointer, whole]
    library.tah2_part_step.argtypes = [pointer, pointer, whole, pointer, whole]
    library.tah2_read.argtypes, library.tah2_read.restype = [pointer, whole, whole], real
    library.tah2_blocks_step.argtypes = [pointer, whole, pointer, pointer, whole, whole, pointer]
    library.tah2_most_probable.argtypes = [
        pointer,
        whole,
        pointer,
        whole,
        whole,
        whole,
        pointer,
        pointer,
        pointer,
        whole,
    ]
    library.tah2_rms_norm.argtypes = [pointer, whole, pointer, whole, whole, real, pointer]
    for name in ("linear", "attend", "block_step", "blocks_step", "part_step", "rms_norm", "largest", "mix"):
        getattr(library, f"tah2_{name}").restype = None
    library.tah2_most_probable.restype = None
    return library
