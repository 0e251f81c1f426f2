"""The likelihood of the mixed prediction, without ever building the mixture over the vocabulary.

    log q[y] = logsumexp_m (log omega^(m) + log q^(m)[y])

The weights come from `tah2.model.weights`, which also says how per-depth lists are laid out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def mixture_logprob(log_weights: Sequence[Tensor], logprobs: Sequence[Tensor], executed: Sequence[Tensor]) -> Tensor:
    """log q_t[y*_t] of every token, fp32 `[N]`, from per-depth log weights and log q^(m)[y*], each `[N_m]`.

    Where a token has no target its log-probabilities are placeholders, and so is its result.
    """
    nothing = torch.full((len(executed[0]),), -math.inf, device=executed[0].device)
    parts = [
        nothing.index_copy(0, here, (weight + logprob).float())
        for weight, logprob, here in zip(log_weights, logprobs, executed, strict=True)
    ]
    return torch.stack(parts).logsumexp(0)
