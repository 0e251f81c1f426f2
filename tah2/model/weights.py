"""How much each executed depth's prediction counts: log weights per depth, for every kind of output.

    omega^(m) = (1 - g^(m)) prod_{j<m} g^(j)   for m < m_t       (stop here)
    omega^(m) = prod_{j<m_t} g^(j)             for m = m_t       (the last executed depth takes the rest)

Depths are ragged. `executed[m-1]` is long `[N_m]`: which of the N tokens executed depth m; depth 1 holds all of
them, each depth a subset of the one before. All per-depth lists hold values on these tokens, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tah2.model.kinds import Output

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


LOG_WEIGHTS: dict[Output, OutputRule] = {
    Output.STOPPING_MIXTURE: stopping_log_weights,
    Output.UNIFORM_MIXTURE: uniform_log_weights,
    Output.LAST: final_log_weights,
}


def _member(tokens: Tensor, count: int) -> Tensor:
    """bool `[count]`: true at `tokens`."""
    member = torch.zeros(count, dtype=torch.bool, device=tokens.device)
    member[tokens] = True
    return member


def _executed_depths(executed: Sequence[Tensor]) -> Tensor:
    """m_t as fp32 `[N]`."""
    return torch.stack([_member(here, len(executed[0])) for here in executed]).float().sum(0)
