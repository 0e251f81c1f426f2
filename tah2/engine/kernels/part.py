"""A learned part of a loop as one call: norms of its inputs side by side, a product, SwiGLU, a norm, perhaps a score.

The decider and the updater are such parts. For a dozen rows their small operations would cost half as much as their
products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tah2.engine.kernels import build
from tah2.engine.kernels.linear import Storage, Weights, pack_linear, packed_swiglu, stored
from tah2.engine.kernels.norm import rms_norm
from tah2.model.parts import RMSNorm, SwiGLU

INPUTS = 3


class _Part(ctypes.Structure):
    """`Part` of `native/part.h`."""

    _fields_ = (
        *((name, Weights) for name in ("fuse", "gate_up", "down")),
        ("input_norms", ctypes.c_void_p * INPUTS),
        ("widths", ctypes.c_int64 * INPUTS),
        *((name, ctypes.c_void_p) for name in ("fused_norm", "output_norm", "score")),
        ("eps", ctypes.c_float),
    )


_Inputs = ctypes.c_int64 * (2 * INPUTS)
"""`Inputs` of `native/part.h`: addresses, then strides."""


class PackedPart:
    """RN(B(fuse [RN(x_1); RN(x_2); ...])) with packed weights, inputs `[n, K_i]`.

    Gives fp32 `[n, d]`, or `[n]` where a score ends it; `fused_norm` stands between the product and B.
    """

    def __init__(
        self,
        input_norms: Sequence[RMSNorm],
        fuse: nn.Linear,
        fused_norm: RMSNorm | None,
        mlp: SwiGLU,
        output_norm: RMSNorm,
        score: nn.Linear | None = None,
        storage: Storage = "fp32",
    ) -> None:
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.fuse = pack_linear(fuse.weight, fuse.bias, storage)
        self.gate_up = packed_swiglu(gate.weight, up.weight, gate.bias, up.bias, storage)
        self.down = pack_linear(down.weight, down.bias, storage)
        self.input_norms = [_scale(norm) for norm in input_norms]
        self.fused_norm = None if fused_norm is None else _scale(fused_norm)
        self.output_norm = _scale(output_norm)
        self.score = None if score is None else stored(score.weight.detach(), storage).float().flatten().contiguous()
        self.eps = output_norm.eps
        self.widths = [norm.numel() for norm in self.input_norms]
        self._library: Any = build.functions()
        self.native = self._as_native()

    def _as_native(self) -> _Part | None:
        weights = [layer.weights for layer in (self.fuse, self.gate_up, self.down)]
        if self._library is None or any(each is None for each in weights) or len(self.widths) > INPUTS:
            return None
        vectors = (self.fused_norm, self.output_norm, self.score)
        return _Part(
            *weights,
            (ctypes.c_void_p * INPUTS)(*(norm.data_ptr() for norm in self.input_norms)),
            (ctypes.c_int64 * INPUTS)(*self.widths),
            *(None if vector is None else vector.data_ptr() for vector in vectors),
            self.eps,
        )

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.native is None:
            return self.stepwise(*inputs)
        rows = [_readable(x) for x in inputs]
        if [x.shape[1] for x in rows] != self.widths:
            raise ValueError(f"This part takes inputs of widths {self.widths}.")
        none = [0] * (INPUTS - len(rows))
        native = _Inputs(*[x.data_ptr() for x in rows], *none, *[x.stride(0) for x in rows])
        count = len(rows[0])
        out = torch.empty(count) if self.score is not None else torch.empty(count, self.down.out_features)
        self._library.tah2_part_step(ctypes.byref(self.native), native, count, out.data_ptr(), torch.get_num_threads())
        return out

    def stepwise(self, *inputs: Tensor) -> Tensor:
        """The plain twin of the compiled step; also what runs where there are no kernels."""
        normed = [rms_norm(x.float(), norm, self.eps) for x, norm in zip(inputs, self.input_norms, strict=True)]
        fused = self.fuse(torch.cat(normed, dim=-1))
        if self.fused_norm is not None:
            fused = rms_norm(fused, self.fused_norm, self.eps)
        out = rms_norm(self.down(self.gate_up(fused)), self.output_norm, self.eps)
        return out if self.score is None else out @ self.score


def _scale(norm: RMSNorm) -> Tensor:
    return norm.weight.detach().float().contiguous()


def _readable(x: Tensor) -> Tensor:
    x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()
