"""How fast this machine reads memory: the yardstick for decoding, which reads every weight once per step."""

from __future__ import annotations

import time

import torch

from tah2.engine.kernels import build
from tah2.engine.kernels.memory import huge_empty


class Reader:
    """Reads `count` fp32 numbers in order; make it larger than the caches."""

    def __init__(self, count: int = 64 << 20) -> None:
        self.memory = huge_empty((count,), torch.float32).fill_(1.0)

    def read(self) -> float:
        """The sum of all numbers, by torch.get_num_threads() threads."""
        library = build.functions()
        if library is None:
            return float(self.memory.sum())
        return float(library.tah2_read(self.memory.data_ptr(), self.memory.numel(), torch.get_num_threads()))

    def bandwidth(self, repetitions: int = 5) -> float:
        """Bytes per second, the best of several readings."""
        best = float("inf")
        for _ in range(repetitions):
            start = time.perf_counter()
            self.read()
            best = min(best, time.perf_counter() - start)
        return self.memory.nbytes / best
