"""Class balance of the decider's labels, counted over all data-parallel ranks.

beta^(m) = #{stop labels} / #{continue labels} among a^(m) = 1,   1 if either class is absent
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tah2.objective.pooling import pool_sum


def class_counts(continues: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """(stop, continue) label counts per depth, long `[depths, 2]`, from bool labels `[n]` per depth."""
    if not continues:
        return torch.zeros(0, 2, dtype=torch.long)
    counts = [torch.stack([(~labels).sum(), labels.sum()]) for labels in continues]
    return pool_sum(torch.stack(counts), group)


def class_balance(counts: Tensor) -> Tensor:
    """beta^(m), fp32 `[depths]`, from `class_counts`."""
    stop, go_on = counts.unbind(-1)
    both = (stop > 0) & (go_on > 0)
    return (stop / go_on.clamp(min=1)).where(both, 1.0)
