"""What sampling and the decider need to know of a row of logits, in few readings.

They serve every engine, so they use the kernels only where packed weights have loaded them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tah2.engine.kernels import build
from tah2.model.scoring import most_probable as stock_most_probable


class Best(NamedTuple):
    """Of each row: the most probable tokens and their fp32 probabilities `[m, k]`, descending; log sum exp `[m]`."""

    tokens: Tensor
    probabilities: Tensor
    log_total: Tensor


def largest(logits: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Where the largest of each row of logits `[n, V]` is (the first of equals), long `[m]`.

    `chosen` (long `[m]`) names the rows, by default all.
    """
    library = build.loaded()
    if library is None or not _readable(logits):
        return (logits if chosen is None else logits[chosen]).argmax(-1)
    rows, chosen = _rows(logits, chosen)
    index = torch.empty(rows, dtype=torch.int64)
    library.tah2_largest(
        logits.data_ptr(),
        logits.stride(0),
        None if chosen is None else chosen.data_ptr(),
        rows,
        logits.shape[1],
        index.data_ptr(),
        torch.get_num_threads(),
    )
    return index


def most_probable(logits: Tensor, top_k: int, chosen: Tensor | None = None) -> Best:
    """The `top_k` most probable tokens of the rows `chosen` (long `[m]`, by default all) of logits `[n, V]`."""
    library = build.loaded()
    if library is None or not _readable(logits):
        return reference_most_probable(logits if chosen is None else logits[chosen], top_k)
    rows, chosen = _rows(logits, chosen)
    shape = (rows, top_k)
    best = Best(torch.empty(shape, dtype=torch.int64), torch.empty(shape), torch.empty(rows))
    library.tah2_most_probable(
        logits.data_ptr(),
        logits.stride(0),
        None if chosen is None else chosen.data_ptr(),
        rows,
        logits.shape[1],
        top_k,
        best.probabilities.data_ptr(),
        best.tokens.data_ptr(),
        best.log_total.data_ptr(),
        torch.get_num_threads(),
    )
    return best


def reference_most_probable(logits: Tensor, top_k: int) -> Best:
    """The plain twin."""
    return Best(*stock_most_probable(logits, top_k), logits.float().logsumexp(-1))


def _rows(logits: Tensor, chosen: Tensor | None) -> tuple[int, Tensor | None]:
    """How many rows, and which; None: all."""
    return (len(logits), None) if chosen is None else (len(chosen), chosen.contiguous())


def _readable(logits: Tensor) -> bool:
    """Can the kernels read these logits in place?"""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1
