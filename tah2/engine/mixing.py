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


def carried(
    output: Output,
    logits: Sequence[Row],
    shares: Sequence[Row] | None,
    log_weight: Tensor,
    log_total: Sequence[float] | None = None,
) -> list[Row]:
    """The shares of tokens that go on; `shares` is None after depth 1.

    `log_weight` fp32 `[n]` is the logarithm of this depth's stopping weight, `log_total` log sum exp of the logits
    where it is known: a first share is then the logits themselves and a number.
    """
    weight = log_weight if output is Output.STOPPING_MIXTURE else log_weight.new_zeros(len(logits))
    if shares is None and log_total is not None:
        return [
            Row(row.table, row.at, plus - total)
            for row, plus, total in zip(logits, weight.tolist(), log_total, strict=True)
        ]
    table = mix(logits, shares, weight)
    return [Row(table, at) for at in range(len(logits))]
