"""One decoder block as one call: norms, packed products, rotary positions, key-value store and paged attention.

At batch 1 a small model's step is hundreds of tiny operations; this makes it one call per block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tah2.engine.kernels import build
from tah2.engine.kernels.attention import Pass, Visible, attend, pass_of, pool_of
from tah2.engine.kernels.linear import Storage, Weights, pack_linear, packed_swiglu
from tah2.model.decoder import Block
from tah2.model.parts import RMSNorm
from tah2.model.rotary import rotate


class _Heads(ctypes.Structure):
    """`Heads` of `native/attention.h`."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("query", "key", "width"))


class _Block(ctypes.Structure):
    """`Block` of `native/block.h`."""

    _fields_ = (
        *((name, Weights) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        ("heads", _Heads),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class Step:
    """What all blocks of one pass over n entries share.

    cosine, sine `[n, D]` fp32; `targets` int32 `[n]`, the slots that the entries' own keys and values go to. An
    entry that is to see itself has its target in its slot list.
    """

    cosine: Tensor
    sine: Tensor
    targets: Tensor
    visible: Visible

    def __post_init__(self) -> None:
        if self.targets.dtype != torch.int32 or not self.targets.is_contiguous():
            raise ValueError(f"Target slots are a contiguous int32 tensor, not {self.targets.dtype}.")
        for name in ("cosine", "sine"):
            field = getattr(self, name)
            if field.dtype != torch.float32 or not field.is_contiguous():
                raise ValueError(f"Rotary angles are contiguous fp32 tensors; {name} is {field.dtype}.")

    def native(self) -> Pass:
        return pass_of(self.visible, self.cosine.data_ptr(), self.sine.data_ptr(), self.targets.data_ptr())


class PackedBlock:
    """A decoder block with packed weights; call it with fp32 hidden states `[n, d]`, which it updates in place."""

    def __init__(self, block: Block, storage: Storage = "fp32") -> None:
        attention, mlp = block.self_attn, block.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = pack_linear([p.weight for p in projections], [p.bias for p in projections], storage)
        self.output = pack_linear(attention.o_proj.weight, attention.o_proj.bias, storage)
        gate, up = mlp.gate_proj, mlp.up_proj
        self.gate_up = packed_swiglu(gate.weight, up.weight, gate.bias, up.bias, storage)
        self.down = pack_linear(mlp.down_proj.weight, mlp.down_proj.bias, storage)
        self.width = attention.head_dim
        self.heads = attention.q_proj.out_features // self.width
        self.kv_heads = attention.k_proj.out_features // self.width
        self.norms = tuple(
            norm.weight.detach().float().contiguous() if isinstance(norm, RMSNorm) else None
            for norm in (block.input_layernorm, block.post_attention_layernorm, attention.q_norm, attention.k_norm)
        )
        self.eps = block.input_layernorm.eps
        self.native = self._as_native()

    def _as_native(self) -> _Block | None:
        weights = [layer.weights for layer in (self.qkv, self.output, self.gate_up, self.down)]
        if any(each is None for each in weights):
            return None
        norms = [None if norm is None else norm.data_ptr() for norm in self.norms]
        return _Block(*weights, *norms, _Heads(self.heads, self.kv_heads, self.width), self.eps, self.width**-0.5)

    def __call__(self, hidden: Tensor, step: Step, key_pool: Tensor, value_pool: Tensor) -> Tensor:
        """hidden `[n, d]` -> the same tensor, one block further; keys and values go into the pools `[slots, G, D]`."""
        library, pool = build.functions(), pool_of(key_pool, value_pool)
        if library is None or pool is None or self.native is None:
            return self.stepwise(hidden, step, key_pool, value_pool)
        if hidden.dtype != torch.float32 or not hidden.is_contiguous():
            raise ValueError(f"A packed block updates contiguous fp32 hidden states, not {hidden.dtype}.")
        native = step.native()
        library.tah2_block_step(ctypes.byref(self.native), ctypes.byref(native), ctypes.byref(pool), hidden.data_ptr())
        return hidden

    def stepwise(self, hidden: Tensor, step: Step, key_pool: Tensor, value_pool: Tensor) -> Tensor:
        """The plain twin of the compiled step, one operation a line; also what runs where there are no kernels."""
        input_norm, post_norm, query_norm, key_norm = self.norms
        projected = self.qkv(_normed(hidden, input_norm, self.eps)).unflatten(-1, (-1, self.width))
        query, key, value = projected.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        query = rotate(_normed(query, query_norm, self.eps), step.cosine, step.sine)
        key = rotate(_normed(key, key_norm, self.eps), step.cosine, step.sine)
        targets = step.targets.long()
        key_pool[targets], value_pool[targets] = key.to(key_pool.dtype), value.to(value_pool.dtype)
        attended = attend(query, key_pool, value_pool, step.visible, self.width**-0.5)
        hidden.add_(self.output(attended.flatten(1)))
        return hidden.add_(self.down(self.gate_up(_normed(hidden, post_norm, self.eps))))


class PackedBlocks:
    """Blocks in a row; the compiled step runs any stretch of them in one call."""

    def __init__(self, blocks: Sequence[PackedBlock]) -> None:
        self.blocks = list(blocks)
        natives = [block.native for block in self.blocks if block.native is not None]
        self.natives = (_Block * len(natives))(*natives) if len(natives) == len(self.blocks) else None

    def __getitem__(self, layer: int) -> PackedBlock:
        return self.blocks[layer]

    def __call__(self, hidden: Tensor, layers: range, step: Step, keys: Tensor, values: Tensor, first: int) -> Tensor:
        """hidden `[n, d]` through `layers`; pools `[pool layers, slots, G, D]` serve them from layer `first` on."""
        library = build.functions()
        pool = pool_of(keys[first], values[first]) if layers else None
        if library is None or pool is None or self.natives is None or layers.step != 1:
            for offset, layer in enumerate(layers):
                hidden = self.blocks[layer](hidden, step, keys[first + offset], values[first + offset])
            return hidden
        if hidden.dtype != torch.float32 or not hidden.is_contiguous():
            raise ValueError(f"Packed blocks update contiguous fp32 hidden states, not {hidden.dtype}.")
        if layers.stop > len(self.blocks) or first + len(layers) > len(keys):
            raise ValueError(f"There are {len(self.blocks)} blocks and {len(keys)} pool layers, too few for {layers}.")
        library.tah2_blocks_step(
            ctypes.byref(self.natives[layers.start]),
            len(layers),
            ctypes.byref(step.native()),
            ctypes.byref(pool),
            keys.stride(0),
            values.stride(0),
            hidden.data_ptr(),
        )
        return hidden


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else F.rms_norm(x, weight.shape, weight, eps)
