"""What sampling and the decider need to know of a row of logits, in few readings.

They serve every engine, so they use the kernels only where packed weights have loaded them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tah2.engine.kernels import build
from tah2.model.scoring import most_probable as stock_most_probable


def largest(logits: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Where the largest of each row of logits `[n, V]` is (the first of equals), long `[m]`.

    `chosen` (long `[m]`) names the rows, by default all.
    """
    library = build.loaded()
    if library is None or not _readable(logits):
        return (logits if chosen is None else logits[chosen]).argmax(-1)
    chosen = _rows(logits, chosen)
    index = torch.empty(len(chosen), dtype=torch.int64)
    library.tah2_largest(
        logits.data_ptr(),
        logits.stride(0),
        chosen.data_ptr(),
        len(chosen),
        logits.shape[1],
        index.data_ptr(),
        torch.get_num_threads(),
    )
    return index


def most_probable(logits: Tensor, top_k: int, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `top_k` most probable tokens of the rows `chosen` (long `[m]`, by default all) of logits `[n, V]`.

    Ids and fp32 probabilities `[m, top_k]`, descending.
    """
    library = build.loaded()
    if library is None or not _readable(logits):
        return stock_most_probable(logits if chosen is None else logits[chosen], top_k)
    chosen = _rows(logits, chosen)
    tokens, probabilities = torch.empty((len(chosen), top_k), dtype=torch.int64), torch.empty((len(chosen), top_k))
    library.tah2_most_probable(
        logits.data_ptr(),
        logits.stride(0),
        chosen.data_ptr(),
        len(chosen),
        logits.shape[1],
        top_k,
        probabilities.data_ptr(),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return tokens, probabilities


def _rows(logits: Tensor, chosen: Tensor | None) -> Tensor:
    return torch.arange(len(logits)) if chosen is None else chosen.contiguous()


def _readable(logits: Tensor) -> bool:
    """Can the kernels read these logits in place?"""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1
