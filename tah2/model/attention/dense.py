"""The reference: one full mask, softmax in fp32, nothing clever."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tah2.visibility import Entries, Rule, dense_mask


@dataclass(frozen=True)
class DensePlan:
    mask: Tensor
    """bool `[queries, keys]`"""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = self.weights(query, key)
        repeats = query.shape[1] // key.shape[1]
        return torch.einsum("hqk,khd->qhd", weights.to(value.dtype), value.repeat_interleave(repeats, dim=1))

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """Attention probabilities, fp32 `[heads, queries, keys]`."""
        repeats = query.shape[1] // key.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.float().repeat_interleave(repeats, dim=1))
        scores = (scores * query.shape[-1] ** -0.5).masked_fill(~self.mask, float("-inf"))
        return scores.softmax(dim=-1)


class DenseBackend:
    def plan(self, rule: Rule, query: Entries, key: Entries) -> DensePlan:
        return DensePlan(dense_mask(rule, query, key))
