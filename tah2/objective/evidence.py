"""What one training pass measured about each depth, laid out for labelling.

    l^(m) = -log q^(m)[y*],   delta^(m) = l^(m) - l^(m+1)

l^(m+1) comes from the executed depth m+1 for tokens that continued and from the lookahead for tokens that stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tah2.objective.head import NO_TARGET


@dataclass(frozen=True)
class Measured:
    """Head readings of one pass, over the `[n]` entries of that pass."""

    token: Tensor
    """long `[n]`: which of the batch's N tokens."""
    target_logprob: Tensor
    """fp32 `[n]`."""
    top_token: Tensor
    """long `[n]`."""


@dataclass(frozen=True)
class Evidence:
    """The supervised tokens that executed depth m (a^(m) = 1), and what another iteration does for them."""

    token: Tensor
    """long `[n]`: which of the batch's N tokens."""
    row: Tensor
    """long `[n]`: which of the entries of depth m; picks the decider's logits."""
    loss: Tensor
    """fp32 `[n]`: l^(m), detached."""
    next_loss: Tensor
    """fp32 `[n]`: l^(m+1), detached; NaN where neither a pass nor a lookahead measured it."""
    top1_correct: Tensor
    """bool `[n]`: the depth's most probable token is the target."""

    @property
    def gain(self) -> Tensor:
        """delta^(m), fp32 `[n]`."""
        return self.loss - self.next_loss


def collect_evidence(executed: Sequence[Measured], lookahead: Sequence[Measured], targets: Tensor) -> list[Evidence]:
    """Evidence for depths 1 .. M-1 from the M executed depths and the M-1 lookaheads; `targets` long `[N]`.

    `lookahead[m-1]` holds depth m+1 as seen by the supervised tokens that stopped at m. Depths that no token
    of this rank executed are empty, not absent: all ranks must hold the same number.
    """
    if len(lookahead) != len(executed) - 1:
        raise ValueError(f"{len(executed)} depths need {len(executed) - 1} lookaheads, not {len(lookahead)}.")
    evidence = []
    for here, beyond, probe in zip(executed, executed[1:], lookahead, strict=False):
        row = (targets[here.token] != NO_TARGET).nonzero()[:, 0]
        token = here.token[row]
        next_loss = torch.full(targets.shape, torch.nan, device=targets.device)
        for measured in (beyond, probe):
            next_loss[measured.token] = -measured.target_logprob.detach().float()
        loss = -here.target_logprob.detach().float()[row]
        evidence.append(Evidence(token, row, loss, next_loss[token], here.top_token[row] == targets[token]))
    return evidence
