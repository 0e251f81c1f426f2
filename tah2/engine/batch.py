"""The rows of one pass, laid out: which tokens, at which depth, reading and writing which slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tah2.engine.paged import ChunkKeys, PagedAttention, PassPlan
from tah2.engine.pool import KVPool, Slots
from tah2.engine.strand import Strand

Longs = NDArray[np.int64]


def layout(strands: Sequence[Strand]) -> list[Strand]:
    """Strands with one row first, then chunks: the order of a pass's rows."""
    return [s for s in strands if s.rows == 1] + [s for s in strands if s.rows > 1]


@dataclass(frozen=True)
class Rows:
    """Per row of the pass; strand i owns rows [bounds[i], bounds[i + 1])."""

    strands: list[Strand]
    bounds: list[int]
    ids: Longs
    position: Longs
    extent: Longs
    """Length of the text that a row belongs to, where the rotary scaling asks for it."""
    depth: Longs
    floor: Longs
    cap: Longs
    ceiling: Longs
    kept: NDArray[np.bool_]

    @classmethod
    def of(cls, strands: Sequence[Strand]) -> Rows:
        """The active rows of laid out strands."""
        local = [s.active for s in strands]
        sizes = [len(rows) for rows in local]
        position = np.concatenate([s.start + rows for s, rows in zip(strands, local, strict=True)])
        each = np.array([(len(s.request.prompt), s.depth, s.request.ceiling, s.start + s.kept_from) for s in strands])
        prompt, depth, ceiling, kept_from = np.repeat(each, sizes, axis=0).T

        def gathered(name: str) -> Longs:
            return np.concatenate([getattr(s, name)[rows] for s, rows in zip(strands, local, strict=True)])

        return cls(
            list(strands),
            list(accumulate(sizes, initial=0)),
            gathered("ids"),
            position,
            np.maximum(position + 1, prompt),
            depth,
            gathered("floor"),
            gathered("cap"),
            ceiling,
            position >= kept_from,
        )

    def __len__(self) -> int:
        return self.bounds[-1]

    @property
    def sizes(self) -> list[int]:
        return [strand.rows for strand in self.strands]

    def part(self, strand: int) -> slice:
        return slice(self.bounds[strand], self.bounds[strand + 1])


def plan_looped(strands: Sequence[Strand], pool: KVPool, paged: PagedAttention) -> PassPlan:
    """Active rows at their strand's depth, against the visibility rule's lists."""
    new = np.concatenate([s.slots[s.active, s.depth - 1] for s in strands])
    singles = [_single_keys(s) for s in strands if s.rows == 1]
    chunks = [_chunk_keys(s) for s in strands if s.rows > 1]
    return _plan(pool, paged, new, singles, chunks)


def plan_once(strands: Sequence[Strand], pool: KVPool, paged: PagedAttention) -> PassPlan:
    """All rows of the strands, plainly causal, in layers that run once per token."""
    new = np.concatenate([s.once for s in strands])
    singles = [np.concatenate([s.request.lists.once, s.once]) for s in strands if len(s) == 1]
    chunks = []
    for s in strands:
        if len(s) > 1:
            before = s.request.lists.once
            chunks.append((np.concatenate([before, s.once]), _behind(len(before), None, len(s))))
    return _plan(pool, paged, new, singles, chunks)


def _single_keys(strand: Strand) -> Slots:
    """What the one active row reads: settled tokens, tokens in flight before it, its own entries."""
    sight, depth = strand.request.sight, strand.depth
    row = int(strand.active[0])
    parts = [strand.request.lists.read_at(depth)]
    for earlier in strand.request.strands:
        if earlier is strand:
            break
        parts.append(sight.read_of(depth, earlier.slots, earlier.executed))
    if row:
        parts.append(sight.read_of(depth, strand.slots[:row], strand.executed[:row]))
    own = strand.slots[row, :depth]
    parts.append(own[sight.own[depth, 1 : depth + 1]])
    return np.concatenate(parts)


def _chunk_keys(strand: Strand) -> tuple[Slots, NDArray[np.bool_] | None]:
    """What the active rows read together, and the mask `[active, keys]`."""
    sight, depth, active = strand.request.sight, strand.depth, strand.active
    table = sight.earlier[sight.list_of[depth]]
    ran = strand.executed.copy()
    ran[active] = depth
    rows, j = np.nonzero(np.arange(1, strand.slots.shape[1] + 1)[None, :] <= ran[:, None])
    j = j + 1
    from_earlier, by_own = table[j, ran[rows]], sight.own[depth, j]
    read = from_earlier | by_own
    rows, j, from_earlier, by_own = rows[read], j[read], from_earlier[read], by_own[read]
    mask = (rows[None, :] < active[:, None]) & from_earlier[None, :]
    mask |= (rows[None, :] == active[:, None]) & by_own[None, :]
    settled = strand.request.lists.read_at(depth)
    plainly_causal = len(rows) == len(active) == len(strand) and bool(from_earlier.all() and by_own.all())
    own = strand.slots[rows, j - 1]
    return np.concatenate([settled, own]), _behind(len(settled), None if plainly_causal else mask, len(active))


def _behind(settled: int, mask: NDArray[np.bool_] | None, rows: int) -> NDArray[np.bool_] | None:
    """The mask of `rows` rows with `settled` visible columns before it; None: plainly causal, and nothing before."""
    if not settled:
        return mask
    own = np.tri(rows, dtype=np.bool_) if mask is None else mask
    return np.concatenate([np.ones((rows, settled), dtype=np.bool_), own], axis=1)


def _plan(
    pool: KVPool,
    paged: PagedAttention,
    new: Slots,
    singles: list[Slots],
    chunks: list[tuple[Slots, NDArray[np.bool_] | None]],
) -> PassPlan:
    device = pool.keys.device
    offsets = np.cumsum([0, *(len(keys) for keys in singles)])
    flat = np.concatenate(singles) if singles else new[:0]
    start, placed = len(singles), []
    sizes = _chunk_sizes(len(new) - len(singles), chunks)
    for (keys, mask), size in zip(chunks, sizes, strict=True):
        visible = None if mask is None else tensor(mask, device)
        placed.append(ChunkKeys(start, start + size, tensor(keys, device), visible))
        start += size
    return PassPlan(
        pool, tensor(new, device), len(singles), tensor(flat, device), tensor(offsets, device), placed, paged
    )


def _chunk_sizes(rows: int, chunks: list[tuple[Slots, NDArray[np.bool_] | None]]) -> list[int]:
    sizes = [len(keys) if mask is None else len(mask) for keys, mask in chunks]
    assert sum(sizes) == rows
    return sizes


def tensor(values: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)
