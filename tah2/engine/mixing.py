"""The mixture of one token's depths, one depth at a time.

`tah2.model.output.mix` has all depths at hand; a decoding engine has one per pass. What a token's earlier depths left
is its *share*; `carried` makes the share that the next depth finds, `stopped` the distribution of a token that stops.
Both give what `mix` gives. At depth 1 a stopping token keeps its logits untouched, and where the last depth alone
speaks nothing is mixed at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tah2.engine.kernels import Row, mix
from tah2.model.kinds import Output


def stopped(
    output: Output, logits: Sequence[Row], shares: Sequence[Row], depth: Tensor, log_survival: Tensor
) -> Tensor:
    """Log-probabilities of tokens that stop at `depth` `[n]` > 1, fp32 `[n, vocabulary]`.

    `log_survival` fp32 `[n]` is the logarithm of the product of the continue probabilities of earlier depths.
    """
    if output is Output.UNIFORM_MIXTURE:
        return mix(logits, shares, log_survival.new_zeros(len(logits)), -depth.float().log())
    return mix(logits, shares, log_survival)


def carried(output: Output, logits: Sequence[Row], shares: Sequence[Row] | None, log_weight: Tensor) -> Tensor:
    """The share of tokens that go on, fp32 `[n, vocabulary]`; `shares` is None after depth 1.

    `log_weight` fp32 `[n]` is the logarithm of this depth's stopping weight.
    """
    return mix(logits, shares, log_weight if output is Output.STOPPING_MIXTURE else log_weight.new_zeros(len(logits)))
