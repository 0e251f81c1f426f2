"""The coverage cutoff: the smallest gain among the largest ones that together hold a fraction rho of all gain.

    i_cov = min{ i : sum_{i'<=i} delta_[i'] >= rho sum_{i'<=n} delta_[i'] },   delta_cut = delta_[i_cov]

over the positive gains delta_[1] >= ... >= delta_[n] > 0 of all data-parallel ranks. rho is a fraction of gain,
not of tokens, and gains equal to the cutoff are all covered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tah2.objective.pooling import pool_values


class Cutoff(NamedTuple):
    """`value` is 0 when no gain was positive; it then serves the weights only, and no token continues."""

    value: float
    any_positive: bool


def coverage_cutoff(gains: Tensor, coverage: float, group: dist.ProcessGroup | None = None) -> Cutoff:
    """The cutoff over `gains` `[n]`, pooled over `group`.

    The same whatever the split over ranks: gains are gathered, sorted, and summed in float64 on the CPU, one
    after the other, because parallel sums round as their schedule goes.
    """
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"The gain coverage must lie in (0, 1], not {coverage}.")
    gains = gains.detach()
    positive = pool_values(gains[gains > 0], group)
    if len(positive) == 0:
        return Cutoff(0.0, False)
    ranked = positive.sort(descending=True).values.double().cpu()
    if coverage == 1.0:
        return Cutoff(ranked[-1].item(), True)
    covered = ranked.cumsum(0)
    rank = int(torch.searchsorted(covered, coverage * covered[-1]))
    return Cutoff(ranked[rank].item(), True)
