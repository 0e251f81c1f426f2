"""Times measured side by side: every round runs each contender once, so that they share the machine's moods."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    seconds: tuple[float, ...]
    """One value per round"""
    processor: tuple[float, ...]
    """Processor seconds of all threads: a busy machine disturbs them less"""

    @property
    def best(self) -> float:
        """The least disturbed round."""
        return min(self.seconds)

    def plain(self) -> dict[str, Any]:
        return {
            "best_s": self.best,
            "median_s": median(self.seconds),
            "rounds_s": list(self.seconds),
            "cpu_s": list(self.processor),
        }


@dataclass(frozen=True)
class Ratio:
    """How many times longer one contender takes than another."""

    value: float
    """Of the best rounds"""
    rounds: tuple[float, ...]
    """Of each round"""
    processor: float
    """Of the best rounds' processor seconds"""

    @classmethod
    def of(cls, one: Timing, other: Timing) -> Ratio:
        rounds = tuple(a / b for a, b in zip(one.seconds, other.seconds, strict=True))
        return cls(one.best / other.best, rounds, min(one.processor) / min(other.processor))

    def plain(self, scale: float = 1.0) -> dict[str, Any]:
        """JSON values, each times `scale`."""
        rounds = [scale * value for value in self.rounds]
        return {
            "of_best": scale * self.value,
            "of_best_cpu_seconds": scale * self.processor,
            "median_of_rounds": median(rounds),
            "of_rounds": rounds,
        }


def interleaved(contenders: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, Timing]:
    """Time each contender `rounds` times after one unmeasured round; odd rounds run in reverse order."""
    names = list(contenders)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            gc.collect()
            _wait(device)
            started, processor = time.perf_counter(), time.process_time()
            contenders[name]()
            _wait(device)
            if number >= 0:
                spent[name].append((time.perf_counter() - started, time.process_time() - processor))
    return {
        name: Timing(tuple(wall for wall, _ in rows), tuple(cpu for _, cpu in rows)) for name, rows in spent.items()
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
