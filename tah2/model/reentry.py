"""How a token re-enters the looped layers: the input of depth 1 and of every later depth.

`anchor` is what the loop returns to (the token embedding; the prelude's output where only the middle
block loops), `state` the looped layers' last output for that token (after the final norm where the whole
stack loops). All are `[N, d]`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.model.parts import Part, RMSNorm, Shapes, SwiGLU


class Predicted(NamedTuple):
    """The most probable next tokens of each entry: ids and probabilities, `[N, k]`, descending."""

    tokens: Tensor
    probabilities: Tensor


class Reentry(Part):
    """Base of every way to re-enter; `top_k` > 0 asks for the current prediction."""

    top_k: int = 0
    fits_prediction: bool = False
    """Begins fitted to the expected next-token embedding (see `start`)."""

    def __init__(self, backbone: BackboneConfig, loop: LoopConfig) -> None:
        super().__init__()

    def start_scale(self, scale: float) -> None:
        """Make the output's root mean square `scale`, before the fit."""

    @staticmethod
    def probabilities(backbone: BackboneConfig, loop: LoopConfig) -> int:
        """The part's `top_k`, known without building it."""
        return 0

    def first(self, anchor: Tensor) -> Tensor:
        return anchor

    def forward(self, anchor: Tensor, state: Tensor, predicted: Predicted | None, embedding: Tensor) -> Tensor:
        raise NotImplementedError


class CarryOver(Reentry):
    """Ouro: the state enters the next iteration unchanged."""

    def forward(self, anchor: Tensor, state: Tensor, predicted: Predicted | None, embedding: Tensor) -> Tensor:
        return state


class Updater(Reentry):
    """TaH2's learned state update: U(e, h) = RN(B_u(RN(W_u [RN(e); RN(h)])))."""

    options = ("updater_width",)
    fits_prediction = True

    def __init__(self, backbone: BackboneConfig, loop: LoopConfig) -> None:
        super().__init__(backbone, loop)
        width, eps = backbone.hidden_size, backbone.rms_norm_eps
        self.embedding_norm = RMSNorm(width, eps)
        self.state_norm = RMSNorm(width, eps)
        self.fuse = nn.Linear(2 * width, width, bias=False)
        self.fused_norm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, self.width(backbone, loop))
        self.output_norm = RMSNorm(width, eps)

    @staticmethod
    def width(backbone: BackboneConfig, loop: LoopConfig) -> int:
        return loop.updater_width or backbone.hidden_size

    @classmethod
    def shapes(cls, backbone: BackboneConfig, loop: LoopConfig) -> Shapes:
        d, inner = backbone.hidden_size, cls.width(backbone, loop)
        return Shapes(((2 * d, d), (d, inner), (d, inner), (inner, d)), vectors=4 * d)

    @torch.no_grad()
    def reset(self) -> None:
        for norm in (self.embedding_norm, self.state_norm, self.fused_norm, self.output_norm):
            nn.init.ones_(norm.weight)
        for linear in (self.fuse, self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    @torch.no_grad()
    def start_scale(self, scale: float) -> None:
        self.output_norm.weight.fill_(scale)

    def forward(self, anchor: Tensor, state: Tensor, predicted: Predicted | None, embedding: Tensor) -> Tensor:
        fused = self.fuse(torch.cat([self.embedding_norm(anchor), self.state_norm(state)], dim=-1))
        return self.output_norm(self.mlp(self.fused_norm(fused)))


class TopKEmbedding(Reentry):
    """The predecessor's parameter-free update: the probability-weighted sum of the top-k token embeddings."""

    options = ("embedding_top_k",)

    def __init__(self, backbone: BackboneConfig, loop: LoopConfig) -> None:
        super().__init__(backbone, loop)
        self.top_k = self.probabilities(backbone, loop)

    @staticmethod
    def probabilities(backbone: BackboneConfig, loop: LoopConfig) -> int:
        return min(loop.embedding_top_k, backbone.vocab_size)

    def forward(self, anchor: Tensor, state: Tensor, predicted: Predicted | None, embedding: Tensor) -> Tensor:
        if predicted is None:
            raise ValueError("The top-k embedding needs the current prediction.")
        tokens, weights = predicted.tokens[:, : self.top_k], predicted.probabilities[:, : self.top_k].float()
        weights = (weights / weights.sum(-1, keepdim=True)).to(embedding.dtype)
        return F.embedding_bag(tokens, embedding, per_sample_weights=weights, mode="sum")


class InputAdapter(Reentry):
    """Huginn's adapter: u = a * r + v * (W_in z), v = softplus(b_in), a = exp(-v exp(b_ret)).

    It starts as the identity on a token's first pass: r^(0) = z, W_in = I and a + v = 1.
    """

    START = 0.5

    def __init__(self, backbone: BackboneConfig, loop: LoopConfig) -> None:
        super().__init__(backbone, loop)
        width = backbone.hidden_size
        self.inject = nn.Linear(width, width, bias=False)
        self.inject_bias = nn.Parameter(torch.zeros(width))
        self.retain_bias = nn.Parameter(torch.zeros(width))

    @classmethod
    def shapes(cls, backbone: BackboneConfig, loop: LoopConfig) -> Shapes:
        d = backbone.hidden_size
        return Shapes(((d, d),), vectors=2 * d)

    @torch.no_grad()
    def reset(self) -> None:
        nn.init.eye_(self.inject.weight)
        self.inject_bias.fill_(math.log(math.expm1(self.START)))
        self.retain_bias.fill_(math.log(-math.log(1 - self.START) / self.START))

    def first(self, anchor: Tensor) -> Tensor:
        return self.combine(anchor, anchor)

    def forward(self, anchor: Tensor, state: Tensor, predicted: Predicted | None, embedding: Tensor) -> Tensor:
        return self.combine(anchor, state)

    def combine(self, anchor: Tensor, state: Tensor) -> Tensor:
        injection = F.softplus(self.inject_bias.float())
        retention = torch.exp(-injection * torch.exp(self.retain_bias.float()))
        return retention.to(state.dtype) * state + injection.to(anchor.dtype) * self.inject(anchor)


REENTRIES: dict[str, type[Reentry]] = {
    "carry-over": CarryOver,
    "updater": Updater,
    "top-k-embedding": TopKEmbedding,
    "input-adapter": InputAdapter,
}
