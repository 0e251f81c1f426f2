"""FlexAttention with block masks: the training and scoring path on GPUs.

The mask comes from `visibility.mask_mod`, so the rule is said once. Keys and queries are sorted by
(document, position, depth), which makes most blocks either full or empty. On CPU FlexAttention has no
backward and is slower than tiles; there it serves the test that holds it equal to the dense reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tah2.model.attention.order import reading_order
from tah2.visibility import Entries, Rule, mask_mod


@cache
def _compiled(name: str) -> Any:
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, name), dynamic=True)


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
        out = _flex(q.is_cuda)(q, k, v, block_mask=self.block_mask, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1).index_select(0, self.query_back)


def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return _compiled("flex_attention") if compiled else flex_attention


class FlexBackend:
    def plan(self, rule: Rule, query: Entries, key: Entries) -> FlexPlan:
        from torch.nn.attention.flex_attention import create_block_mask

        query_order, key_order = reading_order(query), reading_order(key)
        cuda = query_order.is_cuda
        make = _compiled("create_block_mask") if cuda else create_block_mask
        block_mask = make(
            mask_mod(rule, query[query_order], key[key_order]),
            None,
            None,
            len(query),
            len(key),
            device=str(query_order.device),
        )
        return FlexPlan(block_mask, query_order, query_order.argsort(), key_order)
