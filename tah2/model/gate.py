"""Who decides to continue: after each depth below the ceiling a gate gives every token a continue probability.

A gate returns logits in fp32, `[N]`; `g = sigmoid(logit)`. Whether a token continues is the gate's rule
on g, on the survival before it (the product of its earlier g) and on the exit threshold. Under every rule a
higher threshold stops earlier, and a threshold above 1 stops every token at depth 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.model.parts import Part, RMSNorm, Shapes, SwiGLU


class Gate(Part):
    """Base of every gate; `top_k` > 0 asks for the largest prediction probabilities."""

    top_k: int = 0

    def __init__(self, backbone: BackboneConfig, loop: LoopConfig) -> None:
        super().__init__()

    @staticmethod
    def probabilities(backbone: BackboneConfig, loop: LoopConfig) -> int:
        """The gate's `top_k`, known without building it."""
        return 0

    def forward(self, embedding: Tensor, state: Tensor, top_probabilities: Tensor | None) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def continues(probability: Tensor, survival: Tensor, threshold: Tensor | float) -> Tensor:
        raise NotImplementedError


class Decider(Gate):
    """TaH2's decider: g = sigmoid(W_score RN(B_d(W_d [RN(e); RN(h); RN(TopK(q))]))).

    It starts undecided: zero score weights give g = 0.5, so every token continues at the default threshold.
    """

    options = ("decider_width", "decider_top_k")

    def __init__(self, backbone: BackboneConfig, loop: LoopConfig) -> None:
        super().__init__(backbone, loop)
        width, eps = backbone.hidden_size, backbone.rms_norm_eps
        self.top_k = self.probabilities(backbone, loop)
        self.embedding_norm = RMSNorm(width, eps)
        self.state_norm = RMSNorm(width, eps)
        self.probability_norm = RMSNorm(self.top_k, eps)
        self.fuse = nn.Linear(2 * width + self.top_k, width, bias=False)
        self.mlp = SwiGLU(width, self.width(backbone, loop))
        self.output_norm = RMSNorm(width, eps)
        self.score = nn.Linear(width, 1, bias=False)

    @staticmethod
    def width(backbone: BackboneConfig, loop: LoopConfig) -> int:
        return loop.decider_width or backbone.hidden_size

    @staticmethod
    def probabilities(backbone: BackboneConfig, loop: LoopConfig) -> int:
        return min(loop.decider_top_k or backbone.hidden_size, backbone.vocab_size)

    @classmethod
    def shapes(cls, backbone: BackboneConfig, loop: LoopConfig) -> Shapes:
        d, inner, k = backbone.hidden_size, cls.width(backbone, loop), cls.probabilities(backbone, loop)
        return Shapes(((2 * d + k, d), (d, inner), (d, inner), (inner, d), (d, 1)), vectors=3 * d + k)

    @torch.no_grad()
    def reset(self) -> None:
        for norm in (self.embedding_norm, self.state_norm, self.probability_norm, self.output_norm):
            nn.init.ones_(norm.weight)
        for linear in (self.fuse, self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.zeros_(self.score.weight)

    def forward(self, embedding: Tensor, state: Tensor, top_probabilities: Tensor | None) -> Tensor:
        if top_probabilities is None:
            raise ValueError("The decider needs the largest prediction probabilities.")
        probabilities = self.probability_norm(top_probabilities[:, : self.top_k].to(state.dtype))
        evidence = torch.cat([self.embedding_norm(embedding), self.state_norm(state), probabilities], dim=-1)
        return self.score(self.output_norm(self.mlp(self.fuse(evidence)))).squeeze(-1).float()

    @staticmethod
    def continues(probability: Tensor, survival: Tensor, threshold: Tensor | float) -> Tensor:
        return probability >= threshold


class ExitGate(Gate):
    """Ouro's linear gate on the detached state: exit probability lambda = sigmoid(w . h), and g = 1 - lambda.

    The Q-exit rule stops at the first depth whose cumulative exit probability 1 - prod g reaches q. Stated
    on survival: continue while prod g stays above the threshold 1 - q.
    """

    def __init__(self, backbone: BackboneConfig, loop: LoopConfig) -> None:
        super().__init__(backbone, loop)
        self.exit = nn.Linear(backbone.hidden_size, 1, bias=False)

    @classmethod
    def shapes(cls, backbone: BackboneConfig, loop: LoopConfig) -> Shapes:
        return Shapes(((backbone.hidden_size, 1),))

    @torch.no_grad()
    def reset(self) -> None:
        nn.init.zeros_(self.exit.weight)

    def forward(self, embedding: Tensor, state: Tensor, top_probabilities: Tensor | None) -> Tensor:
        return -self.exit(state.detach()).squeeze(-1).float()

    @staticmethod
    def continues(probability: Tensor, survival: Tensor, threshold: Tensor | float) -> Tensor:
        return survival * probability > threshold
