"""The mixture of one token's depths, one depth at a time.

`tah2.model.output.mix` has all depths at hand; a decoding engine has one per pass. `advance` takes the current
depth's logits and what the earlier depths left, and says both what the distribution is if the token stops here and
what to leave for the next depth. Stopping here gives exactly what `mix` gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tah2.model.kinds import Output


def advance(
    output: Output, logits: Tensor, depth: Tensor, so_far: Tensor | None, log_before: Tensor, log_stop: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(distribution if stopped here, what the next depth needs), both fp32 `[n, vocabulary]`.

    `depth` `[n]`; `so_far` `[n, vocabulary]` holds the earlier depths' share (-inf at depth 1); `log_before` `[n]` is
    the logarithm of the survival before this depth, `log_stop` that of this depth's stopping probability.
    """
    if output is Output.LAST:
        return logits, None
    first = (depth == 1)[:, None]
    own = logits.log_softmax(-1)
    so_far = torch.full_like(own, float("-inf")) if so_far is None else so_far
    if output is Output.UNIFORM_MIXTURE:
        together = torch.where(first, own, torch.logaddexp(so_far, own))
        return torch.where(first, logits, together - depth.float().log()[:, None]), together
    mixed = torch.where(first, logits, torch.logaddexp(so_far, log_before[:, None] + own))
    share = (log_before + log_stop)[:, None] + own
    return mixed, torch.where(first, share, torch.logaddexp(so_far, share))
