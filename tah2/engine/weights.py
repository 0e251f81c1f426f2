"""The seam between the runner and the matrix products: who applies layers, the head and the loop's parts.

`ModelWeights` calls the model's own modules and runs everywhere. `packed.PackedWeights` offers the same methods from
weights packed once at load, for small batches on a CPU, and `cuda.graphs.GraphedWeights` from recorded passes on a
GPU; `choose_weights` takes them where they help.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Protocol, Self

from torch import Tensor
from torch.nn import functional as F

from tah2.config.strict import ConfigError
from tah2.engine.config import EngineConfig
from tah2.engine.paged import PaddedAttention, PagedAttention, PassPlan
from tah2.engine.team import ALONE, Team
from tah2.model.gate import Gate
from tah2.model.loop import LoopedDecoder
from tah2.model.reentry import Predicted, Reentry


class Weights(Protocol):
    paged: PagedAttention

    def layers(self, x: Tensor, layers: range, cosine: Tensor, sine: Tensor, plan: PassPlan, pool_layer: int) -> Tensor:
        """x `[n, d]` through backbone layers, whose keys and values live in the plan's pool from `pool_layer` on."""
        ...

    def norm(self, x: Tensor) -> Tensor:
        """The layers' output `[n, d]` -> the state that the head reads."""
        ...

    def head(self, state: Tensor) -> Tensor:
        """state `[n, d]` -> logits `[n, vocabulary]`"""
        ...

    def enter(self, anchor: Tensor) -> Tensor:
        """The input of depth 1, `[n, d]`."""
        ...

    def reenter(self, anchor: Tensor, state: Tensor, predicted: Predicted | None) -> Tensor:
        """The input of the next depth, `[n, d]`."""
        ...

    def gate(self, embedding: Tensor, state: Tensor, top_probabilities: Tensor | None) -> Tensor:
        """Continue logits, fp32 `[n]`."""
        ...


class ModelWeights:
    """The model's modules as they are."""

    def __init__(self, decoder: LoopedDecoder) -> None:
        self.decoder = decoder
        self.paged: PagedAttention = PaddedAttention()
        self.reentry_part: Reentry = decoder.reentry
        self.gate_part: Gate | None = decoder.gate

    def behind(self, decoder: LoopedDecoder) -> Self:
        """The same weights for another loop over the same tensors, with the parts that it has."""
        other = copy.copy(self)
        other.decoder = decoder
        if decoder.gate is None:
            other.reentry_part, other.gate_part = decoder.reentry, None
        return other

    def layers(self, x: Tensor, layers: range, cosine: Tensor, sine: Tensor, plan: PassPlan, pool_layer: int) -> Tensor:
        for offset, layer in enumerate(layers):
            x = self.decoder.layers[layer](x, cosine, sine, plan.attend(pool_layer + offset))[0]
        return x

    def norm(self, x: Tensor) -> Tensor:
        return self.decoder.norm(x)

    def head(self, state: Tensor) -> Tensor:
        return F.linear(state, self.decoder.head_weight)

    def enter(self, anchor: Tensor) -> Tensor:
        return self.reentry_part.first(anchor)

    def reenter(self, anchor: Tensor, state: Tensor, predicted: Predicted | None) -> Tensor:
        return self.reentry_part(anchor, state, predicted, self.decoder.embed_tokens.weight)

    def gate(self, embedding: Tensor, state: Tensor, top_probabilities: Tensor | None) -> Tensor:
        if self.gate_part is None:
            raise ValueError("This loop has no gate.")
        return self.gate_part(embedding, state, top_probabilities)


def choose_weights(decoder: LoopedDecoder, config: EngineConfig, team: Team = ALONE) -> Weights:
    """Packed weights where asked for, or where kernels run and keep the model's own precision; recorded passes on a
    GPU; a team's weights are sharded."""
    if not team.alone:
        from tah2.engine.parallel import ShardedWeights

        return ShardedWeights(decoder, team)
    from tah2.engine import kernels
    from tah2.engine.packed import PackedWeights

    weight = decoder.embed_tokens.weight
    if config.weight_storage != "fp32" and weight.device.type != "cpu":
        raise ConfigError("weight_storage is for models on a CPU; leave it out, or load with dtype=torch.bfloat16.")
    if weight.device.type == "cuda" and config.kernels == "auto" and find_spec("triton"):
        from tah2.engine.cuda.graphs import GraphedWeights

        return GraphedWeights.on_gpu(decoder)
    exact = weight.device.type == "cpu" and weight.element_size() == 4 and kernels.available()
    if config.weight_storage != "fp32" or (config.kernels == "auto" and exact):
        return PackedWeights(decoder, config.weight_storage)
    return ModelWeights(decoder)
