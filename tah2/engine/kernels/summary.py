"""What sampling needs to know of a row of logits, in one reading."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tah2.engine.kernels import build


class Summary(NamedTuple):
    """Per row `[n]`: the largest logit, where it is (first of equals), and log sum exp."""

    maximum: Tensor
    argmax: Tensor
    logsumexp: Tensor


def summarise(logits: Tensor) -> Summary:
    """logits `[n, V]` -> maximum, argmax and logsumexp of each row."""
    library = build.library()
    usable = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1
    if library is None or not usable:
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
