"""Attention over flat entries behind one small seam.

A backend turns (rule, query entries, key entries) into a plan once per pass; every layer of the pass then
calls `plan.attend`. Backends: `dense` (the reference), `tiles` (CPU and GPU, with backward, memory linear in
tokens), `flex` (GPU block masks); `observe` shows the weights behind any of them. The engine brings its own paged
plan: blocks take any `Attend` callable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tah2.config.strict import ConfigError, suggestion
from tah2.visibility import Entries, Rule

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query `[Nq, heads, head_dim]`, new key and value `[Nq, kv_heads, head_dim]`) -> `[Nq, heads, head_dim]`."""


class AttentionPlan(Protocol):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query `[Nq, heads, head_dim]`, key and value `[Nk, kv_heads, head_dim]` -> `[Nq, heads, head_dim]`."""
        ...


class AttentionBackend(Protocol):
    def plan(self, rule: Rule, query: Entries, key: Entries) -> AttentionPlan: ...


def attention_backend(name: str | AttentionBackend, device: torch.device | str = "cpu") -> AttentionBackend:
    """A backend by name; "auto" takes tiles on CPU; on CUDA tiles for plain causal passes, FlexAttention else.

    A backend of the caller's own is taken as it is.
    """
    if not isinstance(name, str):
        return name
    from tah2.model.attention.auto import GpuBackend
    from tah2.model.attention.dense import DenseBackend
    from tah2.model.attention.flex import FlexBackend
    from tah2.model.attention.tiles import TileBackend

    table: dict[str, Callable[[], AttentionBackend]] = {
        "dense": DenseBackend,
        "tiles": TileBackend,
        "flex": FlexBackend,
        "auto": GpuBackend if torch.device(device).type == "cuda" else TileBackend,
    }
    if name not in table:
        raise ConfigError(f"Unknown attention backend {name!r}{suggestion(name, table)}.")
    return table[name]()
