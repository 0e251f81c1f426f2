"""CPU tensors on huge pages, where the system grants them.

Reading weights is what decoding costs on a CPU, and small pages can cost a third of the reading bandwidth (translation
misses, doubled inside a virtual machine). Tensors are cut from chunks that are mapped at once; a chunk goes back to the
system when its last tensor dies.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import torch
from torch import Tensor

PAGE = 2 << 20
CHUNK = 32 << 20
LINE = 64


class Arena:
    """Cuts aligned tensors from huge-page mappings; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised (zero) tensor of `shape`, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            if self._used + size > self._chunk.numel():
                if size > CHUNK // 2:
                    return _mapped(size)[:size].view(dtype).view(shape)
                self._chunk, self._used = _mapped(CHUNK), 0
            start, self._used = self._used, self._used + -(-size // LINE) * LINE
            return self._chunk[start : start + size].view(dtype).view(shape)


def _mapped(size: int) -> Tensor:
    """At least `size` bytes, from a huge-page boundary on: uint8 `[n]`."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    area = mmap.mmap(-1, -(-size // PAGE) * PAGE + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages gives small ones
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE :]


_shared = Arena()


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed CPU tensor on huge pages: for packed weights and for a key-value pool."""
    return _shared.empty(tuple(shape), dtype)
