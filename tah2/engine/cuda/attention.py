"""Decode attention over the paged pool as two Triton kernels; the twin is `tah2.engine.paged.paged_attention`.

A query's slot list is cut into parts that different programs read, so that one long context fills the GPU too; the
second kernel joins the parts. Everything that varies from pass to pass is read from tensors, so that a captured call
can be replayed.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

KEYS = 64
"""Keys of one step of a program."""
PARTS = 32
"""Programs that share a slot list, at most."""
LEAST = 16
"""Triton's matrix products want at least so many rows and columns."""


def paged_attention(query: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    """The compiled `PagedAttention`; a query that sees nothing gets zeros."""
    with torch.cuda.device(query.device):  # where Triton launches
        return _launch(query.contiguous(), key_pool, value_pool, slots, offsets)


def try_kernels(device: torch.device) -> None:
    """Compile and run them once; raises where they cannot."""
    pool = torch.zeros(1, 1, LEAST, device=device)
    index = torch.zeros(2, dtype=torch.long, device=device)
    paged_attention(pool, pool, pool, index[:1], index)


def _launch(query: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    from triton import next_power_of_2

    from tah2.engine.cuda.kernels import attend, join

    rows, heads, width = query.shape
    kv_heads = key_pool.shape[1]
    parts = _parts(rows * kv_heads, query.device)
    shape = (rows, heads, parts)
    summed = torch.empty((*shape, width), dtype=torch.float32, device=query.device)
    largest, weight = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    out = torch.empty_like(query)
    columns = max(LEAST, next_power_of_2(width))
    attend[(rows, kv_heads, parts)](
        query,
        key_pool,
        value_pool,
        slots,
        offsets,
        summed,
        largest,
        weight,
        width**-0.5,
        key_pool.stride(0),
        value_pool.stride(0),
        GROUP=heads // kv_heads,
        GROUP_ROWS=max(LEAST, next_power_of_2(heads // kv_heads)),
        WIDTH=width,
        COLUMNS=columns,
        KEYS=KEYS,
        PARTS=parts,
    )
    join[(rows, heads)](summed, largest, weight, out, WIDTH=width, COLUMNS=columns, PARTS=parts)
    return out


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _parts(programs: int, device: torch.device) -> int:
    """A power of two that gives every processor about two programs."""
    wanted = 2 * _processors(device) // max(1, programs)
    return min(PARTS, 1 << max(0, wanted - 1).bit_length())
