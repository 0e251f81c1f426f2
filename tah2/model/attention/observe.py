"""Attention that can be watched: outputs as the inner backend's, weights of chosen queries shown on the side.

Fast kernels never form the weights; here they are formed again, by the dense reference, one document and a block of
queries at a time, for passes at one depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tah2.model.attention import AttentionBackend, AttentionPlan
from tah2.model.attention.dense import DensePlan
from tah2.visibility import Entries, Rule, dense_mask

Observer = Callable[[int, Entries, Entries, Tensor], None]
"""(layer, query entries `[n]`, key entries `[k]`, weights fp32 `[heads, n, k]`), all of one document."""

CELLS = 1 << 22
"""Weights formed at once, over all heads."""


@dataclass(frozen=True)
class ObservingBackend:
    inner: AttentionBackend
    observer: Observer
    depth: int
    """Passes of this depth are shown, its lookaheads are not"""
    first_layer: int = 0
    """The number of the first layer of such a pass"""

    def plan(self, rule: Rule, query: Entries, key: Entries) -> AttentionPlan:
        plan = self.inner.plan(rule, query, key)
        if int(query.depth[0]) != self.depth or bool(query.lookahead[0]):
            return plan
        return ObservedPlan(plan, self.observer, rule, query, key, self.first_layer)


@dataclass
class ObservedPlan:
    inner: AttentionPlan
    observer: Observer
    rule: Rule
    query: Entries
    key: Entries
    layer: int
    """Of the next call: a pass calls its plan once per layer, in order"""
    documents: list[tuple[Tensor, Tensor]] = field(init=False)
    """(rows of queries, rows of keys) of each document"""

    def __post_init__(self) -> None:
        names = self.query.document.unique().tolist()
        self.documents = [
            ((self.query.document == name).nonzero()[:, 0], (self.key.document == name).nonzero()[:, 0])
            for name in names
        ]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for rows, columns in self.documents:
            for part in rows.split(max(1, CELLS // (query.shape[1] * len(columns)))):
                queries, keys = self.query[part], self.key[columns]
                weights = DensePlan(dense_mask(self.rule, queries, keys)).weights(query[part], key[columns])
                self.observer(self.layer, queries, keys, weights.detach())
        self.layer += 1
        return self.inner.attend(query, key, value)


def observing(
    observer: Observer, depth: int, first_layer: int = 0, device: torch.device | str = "cpu"
) -> ObservingBackend:
    """The device's own backend, watched at one depth; give it to `LoopSettings.attention`."""
    from tah2.model.attention import attention_backend

    return ObservingBackend(attention_backend("auto", device), observer, depth, first_layer)
