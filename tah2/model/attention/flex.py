"""FlexAttention with block masks: the training and scoring path on GPUs.

The mask comes from `visibility.mask_mod`, so the rule is said once. Keys and queries are sorted by
(document, position, depth), which makes most blocks either full or empty. On CPU FlexAttention has no
backward and is slower than tiles; there it serves the test that holds it equal to the dense reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tah2.model.attention.order import reading_order
from tah2.visibility import Entries, Rule, mask_mod

RECOMPILATIONS = 64
"""One compiled variant per rule, gradient mode and dtype; past dynamo's default of 8 it would fall back to eager."""


def _attend(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=query.shape[1] != key.shape[1])


def _block_mask(mod: Any, queries: int, keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mod, None, None, queries, keys, device=device)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, dynamic=True)

    def run(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS):
            return compiled(*arguments)

    return run


def _fast(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    return _compiled(function) if device.type == "cuda" else function


@dataclass(frozen=True)
class FlexPlan:
    block_mask: Any
    query_order: Tensor
    query_back: Tensor
    key_order: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q = query.index_select(0, self.query_order).transpose(0, 1)[None]
        k = key.index_select(0, self.key_order).transpose(0, 1)[None]
        v = value.index_select(0, self.key_order).transpose(0, 1)[None]
        out = _fast(_attend, q.device)(q, k, v, self.block_mask)
        return out[0].transpose(0, 1).index_select(0, self.query_back)


class FlexBackend:
    def plan(self, rule: Rule, query: Entries, key: Entries) -> FlexPlan:
        query_order, key_order = reading_order(query), reading_order(key)
        device = query_order.device
        mod = mask_mod(rule, query[query_order], key[key_order])
        block_mask = _fast(_block_mask, device)(mod, len(query), len(key), str(device))
        return FlexPlan(block_mask, query_order, query_order.argsort(), key_order)
