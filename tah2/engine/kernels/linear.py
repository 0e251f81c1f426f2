"""Linear layers whose weights are packed once, for few rows at a time.

Stock PyTorch repacks the whole weight on every call from two rows on. Packed weights are read once, in order (layout:
`native/linear.h`), so a few rows cost what one costs. An output element depends neither on the other rows of the call
nor on the number of threads: a batch of one equals a batch of many, bit by bit.

Weights may be stored as fp32, bf16 (half the memory, about 2^-9 relative error a weight) or int8 with one scale per
output (a quarter; error of up to 1/254 of the largest weight of its output); products and sums are fp32 in all three.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tah2.config.strict import ConfigError
from tah2.engine.kernels import build
from tah2.engine.kernels.memory import huge_empty

Storage = Literal["fp32", "bf16", "int8"]
STORAGES: tuple[Storage, ...] = ("fp32", "bf16", "int8")
PANEL = 16


class Finish(IntEnum):
    """What becomes of a product: written, added to what is there, or SiLU(gate) * up of interleaved panels."""

    SET = 0
    ADD = 1
    SWIGLU = 2


class Weights(ctypes.Structure):
    """`Weights` of `native/linear.h`."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("storage", ctypes.c_int64),
        ("panels", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


class PackedLinear:
    """x `[..., K]` -> `[..., N]`, fp32 inside, from weights packed once; inference only.

    `weights` is what the compiled kernels read; it is None where there are none, and `plain` then holds the same
    (rounded) weights for stock PyTorch.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, storage: Storage, swiglu: bool = False) -> None:
        self.storage: Storage = storage
        self.swiglu = swiglu
        self.in_features = weight.shape[1]
        self.out_features = weight.shape[0] // 2 if swiglu else weight.shape[0]
        self.weights: Weights | None = None
        library = build.functions() if weight.device.type == "cpu" else None
        if library is None:
            self.plain = (stored(weight, storage), bias)
            return
        self._library = library
        self._packed, self._scale = _pack(weight, storage, swiglu)
        self._bias = None if bias is None else _interleaved(bias.float()[:, None], swiglu).flatten()
        self.weights = Weights(
            self._packed.data_ptr(),
            None if self._scale is None else self._scale.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            STORAGES.index(storage),
            self._packed.shape[0],
            self.in_features,
            self.out_features,
        )

    def __repr__(self) -> str:
        kind = "packed" if self.weights else "plain"
        return f"PackedLinear({self.in_features} -> {self.out_features}, {self.storage}, {kind})"

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x `[..., K]` -> `[..., N]` in x's dtype; with `out` fp32 `[n, N]` the product is added to it instead."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"This layer takes {self.in_features} features, not {x.shape[-1]}.")
        if self.weights is None:
            result = self._stock(x)
            return result if out is None else out.add_(result)
        rows = x.reshape(-1, self.in_features).float()
        if rows.stride(1) != 1 or rows.stride(0) < 0:
            rows = rows.contiguous()
        finish = Finish.SWIGLU if self.swiglu else Finish.SET
        if out is None:
            y = torch.empty((rows.shape[0], self.out_features))
        else:
            y, finish = _addable(out, rows.shape[0], self.out_features, self.swiglu), Finish.ADD
        self._library.tah2_linear(
            ctypes.byref(self.weights),
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            y.data_ptr(),
            finish,
            torch.get_num_threads(),
        )
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def _stock(self, x: Tensor) -> Tensor:
        weight, bias = self.plain
        y = F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)).to(x.dtype)
        if not self.swiglu:
            return y
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up


def pack_linear(
    weight: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor | None] | None = None, storage: Storage = "fp32"
) -> PackedLinear:
    """Pack `[N, K]` weights, or several of the same K as one layer with outputs side by side (q, k, v)."""
    return PackedLinear(*_joined(weight, bias), _checked(storage))


def packed_swiglu(
    gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None, storage: Storage = "fp32"
) -> PackedLinear:
    """x `[..., K]` -> SiLU(x gate^T) * (x up^T) `[..., N]` in one call, from gate and up `[N, K]`."""
    if gate.shape != up.shape:
        raise ValueError(f"Gate {tuple(gate.shape)} and up {tuple(up.shape)} must have the same shape.")
    return PackedLinear(*_joined((gate, up), (gate_bias, up_bias)), _checked(storage), swiglu=True)


@torch.no_grad()
def stored(weight: Tensor, storage: Storage) -> Tensor:
    """The plain twin of packing: `[N, K]` weights as they are after storage, fp32 (unchanged for `fp32`)."""
    if storage == "bf16":
        return weight.bfloat16().float()
    if storage == "int8":
        codes, scale = _quantised(weight.float())
        return codes.float() * scale
    return weight


def _checked(storage: Storage) -> Storage:
    if storage not in STORAGES:
        raise ConfigError(f"Weights are stored as one of {', '.join(STORAGES)}, not {storage!r}.")
    return storage


def _joined(
    weight: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor | None] | None
) -> tuple[Tensor, Tensor | None]:
    """Several layers as one: weights and biases (zero where one has none) on top of each other."""
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [bias] * len(weights) if bias is None or isinstance(bias, Tensor) else list(bias)
    if len(biases) != len(weights) or (isinstance(bias, Tensor) and len(weights) > 1):
        raise ValueError(f"{len(weights)} weights need as many biases (None where there is none), not {len(biases)}.")
    joined = None
    if any(part is not None for part in biases):
        pairs = zip(weights, biases, strict=True)
        joined = torch.cat([w.new_zeros(w.shape[0]) if b is None else b.detach() for w, b in pairs])
    one = weights[0].detach() if len(weights) == 1 else torch.cat([part.detach() for part in weights])
    return one, joined


@torch.no_grad()
def _pack(weight: Tensor, storage: Storage, swiglu: bool) -> tuple[Tensor, Tensor | None]:
    """Panels `[N / 16, K, 16]` in the storage's dtype, and int8's scales `[N]` (both filled up to whole panels)."""
    scale = None
    if storage == "int8":
        weight, scale = _quantised(weight.float())
        scale = _interleaved(scale, swiglu).flatten()
    else:
        weight = weight.to(torch.bfloat16 if storage == "bf16" else torch.float32)
    panels = _interleaved(weight, swiglu).transpose(1, 2)
    return huge_empty(tuple(panels.shape), weight.dtype).copy_(panels), scale


def _interleaved(rows: Tensor, swiglu: bool) -> Tensor:
    """`[N, K]` -> `[panels, 16, K]`, zeros after the end; for SwiGLU panels of gate and up take turns."""
    parts = [_panels(part) for part in (rows.chunk(2) if swiglu else (rows,))]
    return torch.stack(parts, dim=1).flatten(0, 1)


def _panels(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % PANEL
    return F.pad(rows, (0, 0, 0, missing)).view(-1, PANEL, rows.shape[1])


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes `[N, K]` and scales `[N, 1]`: the largest weight of an output becomes 127."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (weight / scale).round_().to(torch.int8), scale


def _addable(out: Tensor, rows: int, width: int, swiglu: bool) -> Tensor:
    if swiglu or out.dtype != torch.float32 or out.shape != (rows, width) or not out.is_contiguous():
        raise ValueError(f"A product can be added to a contiguous fp32 tensor of shape {(rows, width)} only.")
    return out
