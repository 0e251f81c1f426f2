"""The seam between the runner and the matrix products: who applies a block, a head and the loop's parts.

`ModelWeights` calls the model's own modules. A packed or quantised set of weights offers the same methods, built
once from the model at load, and takes its place.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tah2.engine.paged import PaddedAttention, PagedAttention
from tah2.model.attention import Attend
from tah2.model.loop import LoopedDecoder
from tah2.model.reentry import Predicted


class Weights(Protocol):
    paged: PagedAttention

    def block(self, layer: int, x: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        """x `[n, d]` through backbone layer `layer`."""
        ...

    def head(self, state: Tensor) -> Tensor:
        """state `[n, d]` -> logits `[n, vocabulary]`"""
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

    def block(self, layer: int, x: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        out: Tensor = self.decoder.layers[layer](x, cosine, sine, attend)[0]
        return out

    def head(self, state: Tensor) -> Tensor:
        return F.linear(state, self.decoder.head_weight)

    def reenter(self, anchor: Tensor, state: Tensor, predicted: Predicted | None) -> Tensor:
        return self.decoder.reentry(anchor, state, predicted, self.decoder.embed_tokens.weight)

    def gate(self, embedding: Tensor, state: Tensor, top_probabilities: Tensor | None) -> Tensor:
        if self.decoder.gate is None:
            raise ValueError("This loop has no gate.")
        return self.decoder.gate(embedding, state, top_probabilities)


def device_of(decoder: LoopedDecoder) -> torch.device:
    return decoder.embed_tokens.weight.device
