"""Training losses. Each is a sum over this micro-batch divided by a count that the caller states.

`supervised_tokens` (N) counts the supervised tokens of the whole global batch: all accumulated micro-batches
of all ranks. Losses then add up exactly over micro-batches and ranks. (Where gradients are averaged over
ranks, as data parallelism does by default, multiply by the number of ranks.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DECIDER_COEFFICIENT = 0.05
GATE_SHARPNESS = 50.0
GATE_THRESHOLD = 0.005


class JointLoss(NamedTuple):
    """total = prediction + alpha_D decider."""

    total: Tensor
    prediction: Tensor
    decider: Tensor


def prediction_loss(target_logprob: Tensor, supervised: Tensor, supervised_tokens: int) -> Tensor:
    """1/N sum_t -log q_t[y*_t] over `target_logprob` `[n]` where `supervised` bool `[n]`."""
    return -target_logprob.where(supervised, 0.0).sum() / supervised_tokens


def decider_loss(
    continue_logits: Sequence[Tensor],
    continues: Sequence[Tensor],
    weights: Sequence[Tensor],
    balance: Tensor,
    supervised_tokens: int,
) -> Tensor:
    """1/N sum_m sum_t w BCE(g, c), BCE(g, c) = -beta c log g - (1 - c) log(1 - g).

    Per depth: logits `[n]` with gradient, bool labels `[n]`, weights `[n]`; `balance` `[depths]` is beta.
    """
    total = torch.zeros((), device=balance.device)
    for logits, label, weight, beta in zip(continue_logits, continues, weights, balance, strict=True):
        total = total + F.binary_cross_entropy_with_logits(
            logits.float(), label.float(), weight.detach(), pos_weight=beta.detach(), reduction="sum"
        )
    return total / supervised_tokens


def joint_loss(prediction: Tensor, decider: Tensor, coefficient: float = DECIDER_COEFFICIENT) -> JointLoss:
    """The joint objective from `prediction_loss` and `decider_loss`, both already divided by N."""
    return JointLoss(prediction + coefficient * decider, prediction, decider)


def fixed_mixture_loss(target_logprobs: Sequence[Tensor], supervised: Tensor, supervised_tokens: int) -> Tensor:
    """TaH2-fixed: 1/N sum_t -log (1/M sum_m q^(m)[y*]); every depth holds all tokens, `[n]`."""
    mixed = torch.stack(list(target_logprobs)).logsumexp(0) - math.log(len(target_logprobs))
    return prediction_loss(mixed, supervised, supervised_tokens)


def uniform_depth_loss(target_logprobs: Sequence[Tensor], supervised: Tensor, supervised_tokens: int) -> Tensor:
    """Ouro, stage I: 1/N sum_t 1/M sum_m l^(m); every depth holds all tokens, `[n]`.

    The same as `head.nll_sum` of each depth with token weights 1/(M N), which is the cheaper way.
    """
    return prediction_loss(torch.stack(list(target_logprobs)).mean(0), supervised, supervised_tokens)


def exit_gate_loss(
    exit_logits: Sequence[Tensor],
    target_logprobs: Sequence[Tensor],
    supervised: Tensor,
    supervised_tokens: int,
    *,
    sharpness: float = GATE_SHARPNESS,
    threshold: float = GATE_THRESHOLD,
) -> Tensor:
    """Ouro, stage II: 1/M sum_{m<M} 1/N sum_t BCE(1 - lambda^(m), c^(m)).

    lambda = sigmoid(exit logit) and c = sigmoid(k (I - gamma)), I = max(0, l^(m) - l^(m+1)) a constant.
    `exit_logits` holds M-1 tensors `[n]`, `target_logprobs` M; every depth holds all tokens.
    """
    if len(exit_logits) != len(target_logprobs) - 1:
        raise ValueError(f"{len(target_logprobs)} depths need {len(target_logprobs) - 1} exit logits.")
    total = torch.zeros((), device=supervised.device)
    for logits, here, beyond in zip(exit_logits, target_logprobs, target_logprobs[1:], strict=False):
        improvement = (beyond - here).detach().float().clamp(min=0.0)
        target = torch.sigmoid(sharpness * (improvement - threshold))
        each = F.binary_cross_entropy_with_logits(-logits.float(), target, reduction="none")
        total = total + each.where(supervised, 0.0).sum()
    return total / (len(target_logprobs) * supervised_tokens)
