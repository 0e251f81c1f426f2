"""Packed weights behind the runner's seam: fused projections, and one compiled call per block where all rows decode."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tah2.engine import kernels
from tah2.engine.kernels import (
    PackedBlock,
    PackedBlocks,
    PackedLinear,
    Step,
    Storage,
    Visible,
    pack_linear,
    packed_swiglu,
    rms_norm,
)
from tah2.engine.paged import PassPlan
from tah2.engine.weights import ModelWeights
from tah2.model.attention import Attend
from tah2.model.loop import LoopedDecoder
from tah2.model.parts import RMSNorm, SwiGLU
from tah2.model.rotary import rotate

Part = TypeVar("Part", bound=nn.Module)


class PackedWeights(ModelWeights):
    """Weights as they were when this was made; hidden states are fp32."""

    def __init__(self, decoder: LoopedDecoder, storage: Storage = "fp32") -> None:
        super().__init__(decoder)
        self.paged = paged_attention
        self.blocks = PackedBlocks([PackedBlock(block, storage) for block in decoder.layers])  # type: ignore[arg-type]
        self.packed_norm = _Norm(decoder.norm, storage)
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


class _SwiGLU(nn.Module):
    """Gate and up projection as one packed layer."""

    def __init__(self, mlp: SwiGLU, storage: Storage) -> None:
        super().__init__()
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.gate_up = packed_swiglu(gate.weight, up.weight, gate.bias, up.bias, storage)
        self.down = pack_linear(down.weight, down.bias, storage)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))


class _Norm(nn.Module):
    """A norm in one call."""

    def __init__(self, norm: RMSNorm, storage: Storage) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        exact = x.dtype == self.norm.weight.dtype == torch.float32
        return rms_norm(x, self.norm.weight, self.norm.eps) if exact else self.norm(x)


_PACKED: dict[type[nn.Module], Any] = {nn.Linear: _Linear, SwiGLU: _SwiGLU, RMSNorm: _Norm}


def packed_part(part: Part, storage: Storage) -> Part:
    """A copy of a loop's part whose layers are packed."""
    copied: Part = copy.deepcopy(part)
    _pack_children(copied, storage)
    return copied


def _pack_children(module: nn.Module, storage: Storage) -> None:
    for name, child in module.named_children():
        if type(child) in _PACKED:
            setattr(module, name, _PACKED[type(child)](child, storage))
        else:
            _pack_children(child, storage)
