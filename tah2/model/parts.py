"""Small building blocks, and the one way a learned part states its size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig


@dataclass(frozen=True)
class Shapes:
    """What one call of a part multiplies (`linears`, as in-features x out-features) and learns beside (`vectors`).

    Parameter counts and FLOPs derive from this; the modules build themselves from the same numbers.
    """

    linears: tuple[tuple[int, int], ...] = ()
    vectors: int = 0

    @property
    def parameters(self) -> int:
        return sum(a * b for a, b in self.linears) + self.vectors

    @property
    def flops(self) -> int:
        """Matrix-product FLOPs of one call for one token; a multiply-add counts as two."""
        return 2 * sum(a * b for a, b in self.linears)


class Part(nn.Module):
    """A learned part that a loop adds to the backbone."""

    options: tuple[str, ...] = ()
    """Fields of `LoopConfig` that it reads."""

    @classmethod
    def shapes(cls, backbone: BackboneConfig, loop: LoopConfig) -> Shapes:
        return Shapes()

    @torch.no_grad()
    def reset(self) -> None:
        """Set the part to its start state (called after a pretrained backbone has been loaded)."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in fp32, scaled in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.weight * F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)


class SwiGLU(nn.Module):
    """B(x) = W_down [SiLU(W_gate x) * (W_up x)]."""

    def __init__(self, width: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
