"""The mixture of a token's depths over whole rows of logits, in one writing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tah2.engine.kernels import build


class Row(NamedTuple):
    """One row of a table `[n, V]` that several tokens share, so that nothing need be copied, and a number to add."""

    table: Tensor
    at: int
    plus: float = 0.0

    @property
    def value(self) -> Tensor:
        return self.table[self.at] + self.plus if self.plus else self.table[self.at]


def gather(rows: Sequence[Row]) -> Tensor:
    """The rows as one tensor; the table itself where they are all of it, in order."""
    table = rows[0].table
    if len(rows) == len(table) and all(
        row.table is table and row.at == i and not row.plus for i, row in enumerate(rows)
    ):
        return table
    return torch.stack([row.value for row in rows])


def mix(logits: Sequence[Row], shares: Sequence[Row] | None, before: Tensor, after: Tensor | None = None) -> Tensor:
    """log(e^share + e^(before + log_softmax(logits))) + after, fp32 `[n, V]`; without shares the second term alone.

    `before` and `after` are fp32 `[n]`, rows of logits and shares fp32; to rows of logits nothing is to be added.
    """
    library = build.loaded()
    if library is None or not all(_readable(row.table) for row in (*logits, *(shares or ()))):
        return reference_mix(gather(logits), None if shares is None else gather(shares), before, after)
    before, after = before.contiguous(), None if after is None else after.contiguous()
    out = torch.empty(len(logits), logits[0].table.shape[1])
    library.tah2_mix(
        _addresses(logits),
        None if shares is None else _addresses(shares),
        None if shares is None else (ctypes.c_float * len(shares))(*[row.plus for row in shares]),
        before.data_ptr(),
        None if after is None else after.data_ptr(),
        len(out),
        out.shape[1],
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def reference_mix(logits: Tensor, shares: Tensor | None, before: Tensor, after: Tensor | None = None) -> Tensor:
    """The plain twin."""
    own = before[:, None] + logits.log_softmax(-1)
    mixed = own if shares is None else torch.logaddexp(shares, own)
    return mixed if after is None else mixed + after[:, None]


def _addresses(rows: Sequence[Row]) -> ctypes.Array[ctypes.c_void_p]:
    addresses = [row.table.data_ptr() + 4 * row.at * row.table.stride(0) for row in rows]
    return (ctypes.c_void_p * len(rows))(*addresses)


def _readable(table: Tensor) -> bool:
    return table.device.type == "cpu" and table.dtype == torch.float32 and table.stride(-1) == 1
