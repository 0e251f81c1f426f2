"""The mixture of a token's depths over whole rows of logits, in one writing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tah2.engine.kernels import build


class Row(NamedTuple):
    """One row of a table `[n, V]` that several tokens share, so that nothing need be copied."""

    table: Tensor
    at: int

    @property
    def value(self) -> Tensor:
        return self.table[self.at]


class _Mixture(ctypes.Structure):
    """`Mixture` of `native/mixing.h`."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("logits", "shares", "before", "after"))


def gather(rows: Sequence[Row]) -> Tensor:
    """The rows as one tensor; the table itself where they are all of it, in order."""
    table = rows[0].table
    if len(rows) == len(table) and all(row.table is table and row.at == i for i, row in enumerate(rows)):
        return table
    return torch.stack([row.value for row in rows])


def mix(logits: Sequence[Row], shares: Sequence[Row] | None, before: Tensor, after: Tensor | None = None) -> Tensor:
    """log(e^share + e^(before + log_softmax(logits))) + after, fp32 `[n, V]`; without shares the second term alone.

    `before` and `after` are fp32 `[n]`; rows of logits and shares are fp32.
    """
    library = build.loaded()
    tables = {id(row.table): row.table for row in (*logits, *(shares or ()))}.values()
    if library is None or not all(_readable(table) for table in tables):
        return reference_mix(gather(logits), None if shares is None else gather(shares), before, after)
    out = torch.empty(len(logits), logits[0].table.shape[1])
    own, earlier = _addresses(logits), None if shares is None else _addresses(shares)
    before, after = before.contiguous(), torch.zeros(len(logits)) if after is None else after.contiguous()
    native = _Mixture(
        own.ctypes.data, None if earlier is None else earlier.ctypes.data, before.data_ptr(), after.data_ptr()
    )
    library.tah2_mix(ctypes.byref(native), len(out), out.shape[1], out.data_ptr(), torch.get_num_threads())
    return out


def reference_mix(logits: Tensor, shares: Tensor | None, before: Tensor, after: Tensor | None = None) -> Tensor:
    """The plain twin."""
    own = before[:, None] + logits.log_softmax(-1)
    mixed = own if shares is None else torch.logaddexp(shares, own)
    return mixed if after is None else mixed + after[:, None]


def _addresses(rows: Sequence[Row]) -> NDArray[np.int64]:
    return np.array([row.table.data_ptr() + 4 * row.at * row.table.stride(0) for row in rows], dtype=np.int64)


def _readable(table: Tensor) -> bool:
    return table.device.type == "cpu" and table.dtype == torch.float32 and table.stride(-1) == 1
