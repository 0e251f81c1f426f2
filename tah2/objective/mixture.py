"""How the predictions of a token's executed depths become one: stopping weights and the mixture likelihood.

    omega^(m) = (1 - g^(m)) prod_{j<m} g^(j)   for m < m_t       (stop here)
    omega^(m) = prod_{j<m_t} g^(j)             for m = m_t       (the last executed depth takes the rest)
    log q[y] = logsumexp_m (log omega^(m) + log q^(m)[y])

Depths are ragged. `executed[m-1]` is long `[N_m]`: which of the N tokens executed depth m; depth 1 holds all of
them, each depth a subset of the one before. All per-depth lists hold values on these tokens, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tah2.config.strict import ConfigError, suggestion

OutputRule = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
"""(continue logits per depth, executed tokens per depth) -> log weights per depth, each fp32 `[N_m]`."""


def stopping_log_weights(continue_logits: Sequence[Tensor], executed: Sequence[Tensor]) -> list[Tensor]:
    """log omega^(m) from the decider's logits, g^(m) = sigmoid(logit); the last depth needs no logits.

    A token's own last logit does not enter: its last executed depth absorbs the remaining mass.
    """
    log_reach = torch.zeros(len(executed[0]), device=executed[0].device)
    weights = []
    for here, beyond, logits in zip(executed, executed[1:], continue_logits, strict=False):
        goes_on = _member(beyond, len(log_reach))[here]
        logits = logits.float()
        weights.append(log_reach[here] + F.logsigmoid(-logits).where(goes_on, 0.0))
        log_reach = log_reach.index_add(0, here, F.logsigmoid(logits).where(goes_on, 0.0))
    return [*weights, log_reach[executed[-1]]]


def uniform_log_weights(continue_logits: Sequence[Tensor], executed: Sequence[Tensor]) -> list[Tensor]:
    """1/m_t for each executed depth; the logits are not used."""
    log_depth = _executed_depths(executed).log()
    return [-log_depth[here] for here in executed]


def final_log_weights(continue_logits: Sequence[Tensor], executed: Sequence[Tensor]) -> list[Tensor]:
    """All weight on the last executed depth; the logits are not used."""
    last = _executed_depths(executed)
    nothing = torch.tensor(-math.inf, device=last.device)
    return [torch.where(last[here] == depth, 0.0, nothing) for depth, here in enumerate(executed, start=1)]


OUTPUT_RULES: dict[str, OutputRule] = {
    "mixture": stopping_log_weights,
    "uniform": uniform_log_weights,
    "final": final_log_weights,
}


def output_rule(name: str) -> OutputRule:
    """The output rule of this name."""
    if name not in OUTPUT_RULES:
        raise ConfigError(f"Unknown output rule {name!r}{suggestion(name, OUTPUT_RULES)}.")
    return OUTPUT_RULES[name]


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


def _member(tokens: Tensor, count: int) -> Tensor:
    """bool `[count]`: true at `tokens`."""
    member = torch.zeros(count, dtype=torch.bool, device=tokens.device)
    member[tokens] = True
    return member


def _executed_depths(executed: Sequence[Tensor]) -> Tensor:
    """m_t as fp32 `[N]`."""
    return torch.stack([_member(here, len(executed[0])) for here in executed]).float().sum(0)
