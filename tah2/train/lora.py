"""Low-rank adapters on the backbone, for people with one GPU; the updater and the decider train in full.

    y = W x + b + (alpha / r) B A x

B starts at zero, so training starts at the pretrained model. `merge` folds the product into the weight, after
which the checkpoint is an ordinary one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tah2.config.strict import ConfigError, suggestion
from tah2.model.loop import LoopedDecoder

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraConfig:
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1:
            raise ConfigError("An adapter needs rank >= 1, alpha > 0 and dropout in [0, 1).")
        for target in self.targets:
            if target not in TARGETS:
                raise ConfigError(f"Unknown adapter target {target!r}{suggestion(target, TARGETS)}.")


class LoraLinear(nn.Linear):
    """A linear layer with frozen weight and a trained low-rank addition."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = config.alpha / config.rank, config.dropout
        self.lora_a = nn.Parameter(torch.empty(config.rank, base.in_features, device=base.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, config.rank, device=base.weight.device))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.dropout(x, self.dropout, self.training), self.lora_a)
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(low, self.lora_b)

    def merged_weight(self) -> Tensor:
        return self.weight + self.scale * (self.lora_b @ self.lora_a).to(self.weight.dtype)


def add_adapters(decoder: LoopedDecoder, config: LoraConfig) -> None:
    """Freeze the backbone, put adapters on its layers' projections, and leave the loop's own parts trainable."""
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    for part in (decoder.reentry, decoder.gate):
        if part is not None:
            part.requires_grad_(True)
    for block in decoder.layers:
        for parent in (block.self_attn, block.mlp):
            for name in config.targets:
                if hasattr(parent, name):
                    setattr(parent, name, LoraLinear(getattr(parent, name), config))


def is_adapter(name: str) -> bool:
    """Does a state-dict name belong to an adapter?"""
    return name.endswith((".lora_a", ".lora_b"))


@torch.no_grad()
def merge(decoder: LoopedDecoder) -> None:
    """Fold every adapter into its weight, in place."""
    for block in decoder.layers:
        parents: tuple[nn.Module, ...] = (block.self_attn, block.mlp)  # type: ignore[assignment]
        for parent in parents:
            for name, child in list(parent.named_children()):
                if isinstance(child, LoraLinear):
                    plain = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None, device="meta")
                    plain.weight, plain.bias = nn.Parameter(child.merged_weight()), child.bias
                    setattr(parent, name, plain)
