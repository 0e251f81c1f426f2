"""Packed weights behind the runner's seam: fused projections, and one compiled call per block where all rows decode."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tah2.engine import kernels
from tah2.engine.kernels import (
    PackedBlock,
    PackedBlocks,
    PackedLinear,
    PackedPart,
    Step,
    Storage,
    Visible,
    pack_linear,
    rms_norm,
)
from tah2.engine.paged import PassPlan
from tah2.engine.weights import ModelWeights
from tah2.model.attention import Attend
from tah2.model.gate import Decider, Gate
from tah2.model.loop import LoopedDecoder
from tah2.model.parts import RMSNorm
from tah2.model.reentry import Predicted, Reentry, Updater
from tah2.model.rotary import rotate


class PackedWeights(ModelWeights):
    """Weights as they were when this was made; hidden states are fp32."""

    def __init__(self, decoder: LoopedDecoder, storage: Storage = "fp32") -> None:
        super().__init__(decoder)
        self.paged = paged_attention
        self.blocks = PackedBlocks([PackedBlock(block, storage) for block in decoder.layers])  # type: ignore[arg-type]
        self.packed_norm = _Norm(decoder.norm)
        self.packed_head = pack_linear(decoder.head_weight, None, storage)
        self.reentry_part = packed_part(decoder.reentry, storage)
        self.gate_part = None if decoder.gate is None else packed_part(decoder.gate, storage)

    def layers(self, x: Tensor, layers: range, cosine: Tensor, sine: Tensor, plan: PassPlan, pool_layer: int) -> Tensor:
        hidden = x.float().clone(memory_format=torch.contiguous_format)  # blocks update it in place
        cosine, sine = cosine.float().contiguous(), sine.float().contiguous()
        if plan.chunks:
            for offset, layer in enumerate(layers):
                run_with(self.blocks[layer], hidden, cosine, sine, plan.attend(pool_layer + offset))
            return hidden.to(x.dtype)
        visible = Visible.of(plan.slots.int(), plan.offsets.int())
        step = Step(cosine, sine, plan.new_slots.int(), visible)
        self.blocks(hidden, layers, step, plan.pool.keys, plan.pool.values, pool_layer)
        return hidden.to(x.dtype)

    def norm(self, x: Tensor) -> Tensor:
        return self.packed_norm(x)

    def head(self, state: Tensor) -> Tensor:
        return self.packed_head(state)


def run_with(block: PackedBlock, hidden: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> None:
    """One block over rows that include prompt chunks: packed products around the pass's own attention.

    hidden fp32 `[n, d]` is updated in place.
    """
    input_norm, post_norm, query_norm, key_norm = block.norms
    projected = block.qkv(_normed(hidden, input_norm, block.eps)).unflatten(-1, (-1, block.width))
    query, key, value = projected.split((block.heads, block.kv_heads, block.kv_heads), dim=1)
    query = rotate(_normed(query, query_norm, block.eps), cosine, sine)
    key = rotate(_normed(key, key_norm, block.eps), cosine, sine)
    hidden.add_(block.output(attend(query, key, value).flatten(1)))
    hidden.add_(block.down(block.gate_up(_normed(hidden, post_norm, block.eps))))


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else rms_norm(x, weight, eps)


def paged_attention(query: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    """The compiled `PagedAttention`."""
    scale = query.shape[-1] ** -0.5
    return kernels.paged_attention(query, key_pool, value_pool, slots.int(), offsets.int(), scale)


class _Linear(nn.Module):
    """A packed layer in the place of an `nn.Linear`."""

    def __init__(self, linear: nn.Linear, storage: Storage) -> None:
        super().__init__()
        self.packed: PackedLinear = pack_linear(linear.weight, linear.bias, storage)

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)


class _Decider(Gate):
    """The decider in one call."""

    def __init__(self, decider: Decider, storage: Storage) -> None:
        nn.Module.__init__(self)
        self.top_k = decider.top_k
        norms = (decider.embedding_norm, decider.state_norm, decider.probability_norm)
        self.packed = PackedPart(norms, decider.fuse, None, decider.mlp, decider.output_norm, decider.score, storage)

    def forward(self, embedding: Tensor, state: Tensor, top_probabilities: Tensor | None) -> Tensor:
        if top_probabilities is None:
            raise ValueError("The decider needs the largest prediction probabilities.")
        return self.packed(embedding, state, top_probabilities[:, : self.top_k])


class _Updater(Reentry):
    """The updater in one call."""

    def __init__(self, updater: Updater, storage: Storage) -> None:
        nn.Module.__init__(self)
        norms = (updater.embedding_norm, updater.state_norm)
        self.packed = PackedPart(
            norms, updater.fuse, updater.fused_norm, updater.mlp, updater.output_norm, storage=storage
        )

    def forward(self, anchor: Tensor, state: Tensor, predicted: Predicted | None, embedding: Tensor) -> Tensor:
        return self.packed(anchor, state).to(state.dtype)


class _Norm(nn.Module):
    """A norm in one call."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        exact = x.dtype == self.norm.weight.dtype == torch.float32
        return rms_norm(x, self.norm.weight, self.norm.eps) if exact else self.norm(x)


_PACKED: dict[type[nn.Module], Any] = {Decider: _Decider, Updater: _Updater, nn.Linear: _Linear}


def packed_part(part: nn.Module, storage: Storage) -> Any:
    """A copy of a loop's part with packed weights, whole or layer by layer."""
    if type(part) in _PACKED:
        return _PACKED[type(part)](part, storage)
    copied = copy.copy(part)
    copied._modules = {name: packed_part(child, storage) for name, child in part._modules.items() if child is not None}
    return copied
