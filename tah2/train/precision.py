"""Lower precision in one process: computation in bf16, weights and gradients in fp32.

Every parameter is cast once per micro-batch, and the copy stands in for it from forward until backward is over, so that
recomputed blocks find it too. Its gradient, which passes sum up in `dtype`, reaches the parameter through the cast;
micro-batches add up in fp32. Several processes get the same from FSDP2 (see `parallel`), whose bookkeeping
costs a process alone more than the casts do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def computing_in(dtype: torch.dtype, module: nn.Module) -> Iterator[None]:
    """Inside, the floating-point parameters of `module` are copies of `dtype`."""
    masters = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.is_floating_point() and parameter.dtype != dtype
    ]
    copies = {id(parameter): parameter.to(dtype) for _, _, parameter in masters}  # tied weights stay tied
    for part, name, parameter in masters:
        part._parameters[name] = copies[id(parameter)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for part, name, parameter in masters:
            part._parameters[name] = parameter
