"""Pooling over data-parallel ranks. `group` = None means this process alone, with or without torch.distributed.

Every rank of `group` must make the same calls in the same order; a rank without values passes empty tensors.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def pool_sum(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over ranks of `values` (same shape on every rank)."""
    if group is None:
        return values
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total


def pool_values(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The values of all ranks, `[n]` on this rank and any length on others, as one `[sum of n]`."""
    if group is None:
        return values
    ranks = dist.get_world_size(group)
    own_count = torch.tensor([len(values)], device=values.device)
    counts = [torch.zeros_like(own_count) for _ in range(ranks)]
    dist.all_gather(counts, own_count, group=group)
    lengths = torch.cat(counts).tolist()
    padded = values.new_zeros(max(lengths))
    padded[: len(values)] = values
    gathered = [torch.zeros_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])
