"""Paged keys and values with a page size of one slot: memory, and who may use which slot.

A slot of the looped pool holds one entry (token, depth) in every looped layer. Layers that run once per token
(prelude and coda) have a pool of their own with one slot per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Slots = NDArray[np.int64]


class PoolError(RuntimeError):
    """The pool's bookkeeping contradicts itself."""


class SlotAllocator:
    """Hands out slot numbers [0, capacity); freed ones are used again first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._fresh = 0
        """[_fresh, capacity) was never handed out."""
        self._returned: list[int] = []

    @property
    def free(self) -> int:
        return self.capacity - self._fresh + len(self._returned)

    def take(self, count: int) -> list[int]:
        if count > self.free:
            raise PoolError(f"{count} slots were asked for, {self.free} are free.")
        again = min(count, len(self._returned))
        cut = len(self._returned) - again
        taken = self._returned[cut:]
        del self._returned[cut:]
        taken.extend(range(self._fresh, self._fresh + count - again))
        self._fresh += count - again
        return taken

    def give(self, slots: Iterable[int]) -> None:
        self._returned.extend(slots)

    def check(self, used: Slots) -> None:
        """Every slot is either free or used once; `used` names all that their owners believe to hold."""
        returned = np.asarray(self._returned, dtype=np.int64)
        known = np.sort(np.concatenate([used, returned]))
        if len(known) != self._fresh or not np.array_equal(known, np.arange(self._fresh)):
            raise PoolError(
                f"{len(used)} slots are owned, {len(returned)} returned, {self._fresh} were handed out: "
                "a slot leaked or has two owners."
            )


class KVPool:
    """Keys and values `[layers, slots, kv_heads, head_dim]` and their allocator."""

    def __init__(
        self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots = SlotAllocator(slots)
        self.spare = slots
        """A slot that no request owns: rows that only fill up a batch write here."""
        shape = (layers, slots + 1, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # zeros: padding may be read, so it must be finite
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put key and value `[n, kv_heads, head_dim]` into `slots` `[n]`."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)


@dataclass
class Pools:
    """The pools of one model."""

    looped: KVPool
    once: KVPool | None
    """None where the whole stack loops."""

    def room(self, looped: int, once: int) -> bool:
        return self.looped.slots.free >= looped and (self.once is None or self.once.slots.free >= once)

    def give(self, looped: Iterable[int], once: Iterable[int]) -> None:
        self.looped.slots.give(looped)
        if self.once is not None:
            self.once.slots.give(once)

    def check(self, looped: Slots, once: Slots) -> None:
        self.looped.slots.check(looped)
        if self.once is not None:
            self.once.slots.check(once)
