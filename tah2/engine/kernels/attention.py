"""Attention of flat entries over a paged key-value pool, read in place through slot lists."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tah2.engine.kernels import build


@dataclass(frozen=True)
class Visible:
    """What each of n entries sees: entry i reads the pool at `slots[starts[i] : ends[i]]` (int32, CPU for kernels).

    Ranges may overlap: entries of one request at one depth are prefixes of the same list.
    """

    slots: Tensor
    starts: Tensor
    ends: Tensor

    def __post_init__(self) -> None:
        for name in ("slots", "starts", "ends"):
            field = getattr(self, name)
            if field.dtype != torch.int32 or not field.is_contiguous():
                raise ValueError(f"Slot lists are contiguous int32 tensors; {name} is {field.dtype}.")
        if self.starts.shape != self.ends.shape:
            raise ValueError("Every entry needs a start and an end in the slot list.")

    @classmethod
    def of(cls, slots: Tensor, offsets: Tensor) -> Visible:
        """From flat slots and `offsets` `[n + 1]`: entry i sees `slots[offsets[i] : offsets[i + 1]]`."""
        return cls(slots, offsets[:-1], offsets[1:])


class Pass(ctypes.Structure):
    """`Pass` of `native/block.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "targets", "slots", "starts", "ends")),
        ("entries", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


class Pool(ctypes.Structure):
    """`PoolView` of `native/kernels.cpp`."""

    _fields_ = (
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("half", ctypes.c_int64),
    )


def pass_of(visible: Visible, cosine: int | None = None, sine: int | None = None, targets: int | None = None) -> Pass:
    slots, starts, ends = visible.slots.data_ptr(), visible.starts.data_ptr(), visible.ends.data_ptr()
    return Pass(cosine, sine, targets, slots, starts, ends, visible.starts.numel(), torch.get_num_threads())


def pool_of(key_pool: Tensor, value_pool: Tensor) -> Pool | None:
    """The pools `[slots, G, D]` as the kernels see them, or None where they cannot read them."""
    for pool in (key_pool, value_pool):
        dense = pool.stride(2) == 1 and (pool.shape[1] == 1 or pool.stride(1) == pool.shape[2])
        if pool.device.type != "cpu" or pool.dtype not in (torch.float32, torch.bfloat16) or not dense:
            return None
    if key_pool.dtype != value_pool.dtype:
        return None
    half = int(key_pool.dtype == torch.bfloat16)
    return Pool(key_pool.data_ptr(), value_pool.data_ptr(), key_pool.stride(0), value_pool.stride(0), half)


def paged_attention(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor, offsets: Tensor, scale: float
) -> Tensor:
    """query `[n, H, D]` over pools `[slots, G, D]` -> `[n, H, D]`; slot lists as in `Visible.of`."""
    return attend(query, key_pool, value_pool, Visible.of(slots, offsets), scale)


def attend(query: Tensor, key_pool: Tensor, value_pool: Tensor, visible: Visible, scale: float) -> Tensor:
    """query `[n, H, D]` over pools `[slots, G, D]` -> `[n, H, D]`; zeros for an entry that sees nothing.

    An entry's result depends neither on the other entries nor on the number of threads.
    """
    library, pool = build.functions(), pool_of(key_pool, value_pool)
    if library is None or pool is None or query.device.type != "cpu":
        return reference_attend(query, key_pool, value_pool, visible, scale)
    entries, heads, width = query.shape
    rows = query.float().contiguous()
    out = torch.empty((entries, heads, width))
    step = pass_of(visible)
    library.tah2_attend(
        rows.data_ptr(),
        ctypes.byref(pool),
        ctypes.byref(step),
        heads,
        key_pool.shape[1],
        width,
        scale,
        out.data_ptr(),
    )
    return out.to(query.dtype)


def reference_attend(query: Tensor, key_pool: Tensor, value_pool: Tensor, visible: Visible, scale: float) -> Tensor:
    """The plain twin: one softmax per entry over gathered keys and values."""
    rows = []
    bounds = zip(visible.starts.tolist(), visible.ends.tolist(), strict=True)
    for (start, end), own in zip(bounds, query, strict=True):
        if start == end:
            rows.append(torch.zeros_like(own))
            continue
        seen = visible.slots[start:end].long()
        key = key_pool[seen].to(own.dtype).transpose(0, 1)
        value = value_pool[seen].to(own.dtype).transpose(0, 1)
        shared = own.unflatten(0, (key.shape[0], -1))
        rows.append(F.scaled_dot_product_attention(shared, key, value, scale=scale).flatten(0, 1))
    return torch.stack(rows) if rows else torch.empty_like(query)
