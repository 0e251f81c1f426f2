"""Attention over the pool: the plan of one pass, and the plain twin of the decode kernel.

Rows of a pass come in two shapes. A *single* is one query with a flat list of slots; all singles of a pass go
through one call of `paged_attention`. A *chunk* is a run of queries of one request at one depth that share most of
their keys; it gathers these keys once per layer and runs dense attention under a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from tah2.engine.pool import KVPool
from tah2.model.attention import Attend

PagedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query `[n, heads, head_dim]`, key and value pool `[slots, kv_heads, head_dim]`, flat slots long `[total]`,
offsets long `[n + 1]`) -> `[n, heads, head_dim]`; query i reads slots[offsets[i]:offsets[i + 1]]."""


class PaddedAttention:
    """`PagedAttention` in stock PyTorch: gather every query's keys, padded to the longest list."""

    def __init__(self) -> None:
        self._slots: Tensor | None = None
        self._padded: tuple[Tensor, Tensor | None] = (torch.empty(0), None)

    def __call__(self, query: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
        if slots is not self._slots:  # the layers of a pass share one padding
            self._slots, self._padded = slots, _pad(slots, offsets)
        index, mask = self._padded
        key = key_pool.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
        value = value_pool.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
        grouped = query.unflatten(1, (key.shape[1], -1))  # [n, kv_heads, group, head_dim]: a group shares its keys
        return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask).flatten(1, 2)


def _pad(slots: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Slot indices `[n, longest]` and the mask of real ones `[n, 1, 1, longest]` (None where all are real)."""
    lengths = offsets.diff()
    longest = int(lengths.max())
    if slots.numel() == longest * lengths.numel():
        return slots.view(-1, longest), None
    real = torch.arange(longest, device=slots.device)[None, :] < lengths[:, None]
    index = slots.new_zeros(real.shape)
    index[real] = slots
    return index, real[:, None, None, :]


def paged_attention(query: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    """The reference of every decode kernel; see `PagedAttention`."""
    out = torch.empty_like(query)
    repeats = query.shape[1] // key_pool.shape[1]
    bounds = offsets.tolist()
    for row, (start, end) in enumerate(pairwise(bounds)):
        key = key_pool[slots[start:end]].float().repeat_interleave(repeats, dim=1)
        value = value_pool[slots[start:end]].float().repeat_interleave(repeats, dim=1)
        weights = torch.einsum("hd,shd->hs", query[row].float(), key) * query.shape[-1] ** -0.5
        out[row] = torch.einsum("hs,shd->hd", weights.softmax(-1), value).to(query.dtype)
    return out


@dataclass(frozen=True)
class ChunkKeys:
    """Rows [start, end) of the pass, the slots that any of them reads, and who reads which."""

    start: int
    end: int
    slots: Tensor
    """long `[keys]`"""
    mask: Tensor | None
    """bool `[end - start, keys]`; None: plainly causal, key i is row i's own"""


@dataclass(frozen=True)
class PassPlan:
    """What the rows of one pass read and write in one pool: singles first, then chunks."""

    pool: KVPool
    new_slots: Tensor
    """long `[rows]`: where each row's key and value go"""
    singles: int
    slots: Tensor
    offsets: Tensor
    chunks: list[ChunkKeys]
    paged: PagedAttention

    def attend(self, layer: int) -> Attend:
        """Attention of the pool's layer `layer` as blocks take it."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.pool.write(layer, self.new_slots, key, value)
            keys, values = self.pool.keys[layer], self.pool.values[layer]
            parts = []
            if self.singles:
                parts.append(self.paged(query[: self.singles], keys, values, self.slots, self.offsets))
            parts += [_attend_chunk(query[chunk.start : chunk.end], keys, values, chunk) for chunk in self.chunks]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attend


def _attend_chunk(query: Tensor, keys: Tensor, values: Tensor, chunk: ChunkKeys) -> Tensor:
    repeats = query.shape[1] // keys.shape[1]
    key = keys.index_select(0, chunk.slots).transpose(0, 1).repeat_interleave(repeats, dim=0)
    value = values.index_select(0, chunk.slots).transpose(0, 1).repeat_interleave(repeats, dim=0)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key[None], value[None], attn_mask=chunk.mask, is_causal=chunk.mask is None
    )
    return out[0].transpose(0, 1)
