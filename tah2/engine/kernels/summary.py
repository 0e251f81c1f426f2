"""What sampling and the decider need to know of a row of logits, in few readings.

`largest` and `most_probable` serve every engine, so they use the kernels only where packed weights have loaded them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tah2.engine.kernels import build
from tah2.model.scoring import most_probable as stock_most_probable


class Summary(NamedTuple):
    """Per row `[n]`: the largest logit, where it is (first of equals), and log sum exp."""

    maximum: Tensor
    argmax: Tensor
    logsumexp: Tensor


def summarise(logits: Tensor) -> Summary:
    """logits `[n, V]` -> maximum, argmax and logsumexp of each row."""
    library = build.library()
    if library is None or not _readable(logits):
        return reference_summarise(logits)
    rows, width = logits.shape
    result = Summary(torch.empty(rows), torch.empty(rows, dtype=torch.int64), torch.empty(rows))
    pointers = [field.data_ptr() for field in result]
    library.tah2_summary(logits.data_ptr(), logits.stride(0), rows, width, *pointers, torch.get_num_threads())
    return result


def reference_summarise(logits: Tensor) -> Summary:
    """The plain twin."""
    maximum, argmax = logits.max(dim=-1)
    return Summary(maximum, argmax, logits.logsumexp(dim=-1))


def largest(logits: Tensor) -> Tensor:
    """fp32 logits `[n, V]` -> where the largest of each row is (the first of equals), long `[n]`."""
    library = build.loaded()
    if library is None or not _readable(logits):
        return logits.argmax(-1)
    rows, width = logits.shape
    index = torch.empty(rows, dtype=torch.int64)
    threads = torch.get_num_threads()
    library.tah2_summary(logits.data_ptr(), logits.stride(0), rows, width, None, index.data_ptr(), None, threads)
    return index


def most_probable(logits: Tensor, top_k: int, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `top_k` most probable tokens of the rows `chosen` (long `[m]`, by default all) of logits `[n, V]`.

    Ids and fp32 probabilities `[m, top_k]`, descending.
    """
    library = build.loaded()
    if library is None or not _readable(logits):
        return stock_most_probable(logits if chosen is None else logits[chosen], top_k)
    chosen = torch.arange(len(logits)) if chosen is None else chosen.contiguous()
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


def _readable(logits: Tensor) -> bool:
    """Can the kernels read these logits in place?"""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1
