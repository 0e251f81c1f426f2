"""The price of one call of each part, and the FLOPs of any amount of work at these prices.

Matrix products alone count, a multiply-add as two operations: a linear map a -> b costs 2ab per token (the paper's
convention). Elementwise operations, softmax, top-k selection, mixtures and sampling are free.

Paper symbols: F_bb = L[4d(q + d_kv) + 6d d_ff] with query width q = heads x head_dim (the paper's q = d holds for
some models only), F_head = 2dV, F_attn(S) = 4LqS for S visible keys, F_upd and F_decider the sum of 2ab over the
linear maps of the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.model.kinds import LoopKind, kind_of
from tah2.model.reentry import Reentry


@dataclass(frozen=True)
class PerCall:
    """FLOPs per call for one token."""

    layer: int
    """Projections and MLP of one layer."""
    layer_key: int
    """Attention of one layer, per visible key."""
    prelude: int
    looped: int
    coda: int
    """How many layers run once before the loop, in every iteration, and after it."""
    head: int
    reentry: int
    reentry_starts: bool
    """The re-entry part also makes the input of depth 1 (Huginn's adapter)."""
    gate: int

    @property
    def layers(self) -> int:
        return self.prelude + self.looped + self.coda

    @property
    def backbone(self) -> int:
        """One pass through all layers."""
        return self.layers * self.layer

    @property
    def attention_per_key(self) -> int:
        """One visible key in all layers."""
        return self.layers * self.layer_key

    @property
    def looped_share(self) -> float:
        """The part of a whole pass that repeats."""
        return self.looped / self.layers


def per_call(backbone: BackboneConfig, loop: LoopConfig) -> PerCall:
    kind = kind_of(loop)
    looped = kind.looped_layers(loop, backbone)
    d, q, kv = backbone.hidden_size, backbone.query_width, backbone.kv_width
    return PerCall(
        layer=4 * d * (q + kv) + 6 * d * backbone.intermediate_size,
        layer_key=4 * q,
        prelude=looped.start,
        looped=len(looped),
        coda=backbone.num_layers - looped.stop,
        head=2 * d * backbone.vocab_size,
        reentry=kind.reentry.shapes(backbone, loop).flops,
        reentry_starts=kind.reentry.first is not Reentry.first,
        gate=0 if kind.gate is None else kind.gate.shapes(backbone, loop).flops,
    )


@dataclass(frozen=True)
class Work:
    """How much a model ran, at any scale: one token, one response, a training run, or a mean per token."""

    tokens: Sequence[float]
    """N_m: tokens that executed iteration m, for m = 1..M."""
    pairs: Sequence[float]
    """A_m: query-key pairs that the visibility rule allowed at depth m."""
    once: float
    """Query-key pairs of layers that run once per token, plainly causal: the sum over tokens of their position."""


@dataclass(frozen=True)
class Breakdown:
    """FLOPs by where they are spent."""

    backbone: float
    attention: float
    head: float
    reentry: float
    gate: float

    @property
    def total(self) -> float:
        return self.backbone + self.attention + self.head + self.reentry + self.gate


def forward(price: PerCall, work: Work, head_every_depth: bool) -> Breakdown:
    """Forward FLOPs of `work`; integers in, exact integers out.

    The re-entry part prepares depths 2 to M (and depth 1 where it starts the loop); the gate runs after depths 1 to
    M - 1; prelude, coda and a head that is not read at every depth run once per token.
    """
    first, executed = work.tokens[0], sum(work.tokens)
    once = price.prelude + price.coda
    return Breakdown(
        backbone=price.layer * (once * first + price.looped * executed),
        attention=price.layer_key * (once * work.once + price.looped * sum(work.pairs)),
        head=price.head * (executed if head_every_depth else first),
        reentry=price.reentry * (executed if price.reentry_starts else sum(work.tokens[1:])),
        gate=price.gate * sum(work.tokens[:-1]),
    )


def inference_head_every_depth(kind: LoopKind, backbone: BackboneConfig, loop: LoopConfig) -> bool:
    """A middle loop's head sits behind the coda, which runs once."""
    gate_top_k = 0 if kind.gate is None else kind.gate.probabilities(backbone, loop)
    top_k = max(gate_top_k, kind.reentry.probabilities(backbone, loop))
    return not kind.loops_middle and kind.head_every_depth(top_k)
