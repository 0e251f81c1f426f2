"""The GPU's choice per pass: flash attention where the pass is plain causal, FlexAttention's block masks elsewhere."""

from __future__ import annotations

from tah2.model.attention.flex import FlexBackend, FlexPlan
from tah2.model.attention.tiles import TileBackend, TilePlan, is_plain_causal
from tah2.visibility import Entries, Rule


class GpuBackend:
    """First passes and per-iteration loops are plain causal; stock SDPA runs them without any mask."""

    def plan(self, rule: Rule, query: Entries, key: Entries) -> TilePlan | FlexPlan:
        backend = TileBackend() if is_plain_causal(rule, query, key) else FlexBackend()
        return backend.plan(rule, query, key)
